"""`retrain replay DIR --flags`: recompute the advantages of recorded rollouts with a different method."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.config.flags import click_options, naming_flags, overrides_from
from retrain.config.load import override
from retrain.config.options import paths_where
from retrain.errors import ConfigError
from retrain.runtime.text import plural
from retrain.storage.checkpoint import read_state

if TYPE_CHECKING:
    from retrain.analysis.replay import Difference


@click.command("replay", context_settings={"max_content_width": 110})
@click.argument("log_dir", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step.")
def command(log_dir: str, as_json: bool, **parameters: object) -> int:
    """Compare the advantages of the recorded run in LOG_DIR with those of another method, given by flags.

    Example: retrain replay logs/train --transform-mode gtpo_hicra --hicra-alpha 0.3

    The flags are those of training that affect only the advantages. Any other is rejected.
    """
    overrides = overrides_from(parameters)
    for path in overrides:
        if path not in paths_where("replay"):
            raise ConfigError(f"{path} cannot be replayed: only credit assignment is recomputed.")
    config_file = Path(log_dir) / "config.toml"
    if not config_file.is_file():
        raise ConfigError(f"{log_dir} is not a run folder: it has no config.toml.")
    from retrain.analysis.replay import replay  # noqa: PLC0415  (loads the tokenizer's libraries)
    from retrain.analysis.runs import describe_edits, read_config  # noqa: PLC0415

    state = read_state(Path(log_dir))
    recorded, edits = read_config(Path(log_dir), state)
    with naming_flags(overrides):
        wanted = override(recorded, overrides, str(config_file))
    differences = list(replay(Path(log_dir), recorded, wanted))
    if as_json:
        for difference in differences:
            click.echo(json.dumps(asdict(difference)))
        return 0
    for line in describe_edits(Path(log_dir), edits):
        click.echo(f"Note: {line}")
    for line in state.get("forced", []):
        click.echo(f"Note: --force-resume: {line}. Earlier steps are computed with the later options, too.")
    click.echo(f"{recorded.condition} -> {wanted.condition}, {plural(len(differences), 'recorded step')}")
    click.echo(f"{'step':>6}{'tokens':>9}{'mean |A|':>19}{'mean |dA|':>11}{'sign flips':>12}{'on planning':>19}")
    for difference in [*differences, *([total(differences)] if len(differences) > 1 else [])]:
        click.echo(format_row(difference))
    return 0


def format_row(d: Difference) -> str:
    """One row of the table: a step, or all steps."""
    name = "all" if d.step < 0 else str(d.step)
    means = f"{d.mean_before:.4f} -> {d.mean_after:.4f}"
    shares = f"{100 * d.planning_before:.1f}% -> {100 * d.planning_after:.1f}%"
    return f"{name:>6}{d.tokens:>9}{means:>19}{d.changed:>11.4f}{d.sign_flips:>12}{shares:>19}"


def total(differences: list[Difference]) -> Difference:
    """All steps as one; its step is -1."""
    tokens = sum(d.tokens for d in differences)
    before = sum(d.mean_before * d.tokens for d in differences)
    after = sum(d.mean_after * d.tokens for d in differences)
    # Shares are of the absolute advantage, so a step counts by what it has of it.
    on_planning = sum(d.planning_before * d.mean_before * d.tokens for d in differences)
    on_planning_after = sum(d.planning_after * d.mean_after * d.tokens for d in differences)
    return replace(
        differences[0],
        step=-1,
        tokens=tokens,
        mean_before=before / max(1, tokens),
        mean_after=after / max(1, tokens),
        changed=sum(d.changed * d.tokens for d in differences) / max(1, tokens),
        sign_flips=sum(d.sign_flips for d in differences),
        planning_before=on_planning / before if before else 0.0,
        planning_after=on_planning_after / after if after else 0.0,
    )


command.params.extend(click_options(listed=paths_where("replay")))
