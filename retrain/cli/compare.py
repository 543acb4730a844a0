"""`retrain compare`: are these conditions different, seed by seed?"""

from __future__ import annotations

import sys
from typing import Any

import click

from retrain.cli.console import print_json, print_table
from retrain.errors import ConfigError


@click.command("compare", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, required=True, type=click.Path())
@click.option(
    "--metric", default=None, help="What to compare; eval_pass_at_1 where all runs have it, else correct_rate."
)
@click.option("--baseline", default=None, help="Condition that the others are compared with; the first one by default.")
@click.option("--alpha", type=click.FloatRange(0.0001, 0.5), default=0.05, show_default=True, help="Error rate.")
@click.option(
    "--last",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Steps that a training metric is averaged over.",
)
@click.option("--lower-is-better", is_flag=True, help="Less of the metric is an improvement.")
@click.option("--allow-different-models", is_flag=True, help="Compare runs of different models all the same.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
def command(
    folders: tuple[str, ...], as_json: bool, markdown: bool, allow_different_models: bool, **options: Any
) -> int:
    """Compare the conditions of a campaign, or of several runs, paired by seed.

    FOLDERS are campaigns, runs, or folders that hold runs. For example: retrain compare logs/campaign_20261115_120000

    The JSON has these keys: metric, step, higher_is_better, alpha, notes, noise_floor, values (by condition and seed)
    and comparisons, each with verdict (statistically_significant_improvement, significant_degradation or
    insufficient_evidence) and sentence.
    """
    if as_json and markdown:
        raise ConfigError("--json and --markdown cannot both be had.")
    from retrain.analysis.comparison import compare_runs, early_stops, markdown_lines  # noqa: PLC0415  (loads scipy)
    from retrain.analysis.runs import find_runs, require_same_model  # noqa: PLC0415

    runs = find_runs(folders)
    if not allow_different_models:
        require_same_model(runs)
    data = compare_runs(runs, **options)
    data["notes"] += early_stops(folders)
    if as_json:
        print_json(data)
    elif markdown:
        click.echo("\n".join(markdown_lines(data)))
    else:
        _print(data)
    return 0


def _print(data: dict[str, Any]) -> None:
    from retrain.analysis.comparison import COLUMNS, explanation_lines, table_rows  # noqa: PLC0415

    direction = "higher" if data["higher_is_better"] else "lower"
    click.echo(f"{data['metric']} at step {data['step']}, {direction} is better, paired by seed\n")
    rows = table_rows(data)
    print_table(COLUMNS, rows if sys.stdout.isatty() else [COLUMNS, *rows])
    click.echo()
    for line in explanation_lines(data):
        click.echo(line)
