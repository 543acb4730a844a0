"""`retrain demo`: train the built-in model on arithmetic on the CPU, offline."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.config import load_config
from retrain.config.reference import TEMPLATES
from retrain.runtime.text import plural

if TYPE_CHECKING:
    from retrain.evaluate import Evaluation
    from retrain.types import Example

CHART_ROWS, CHART_COLUMNS = 10, 64
SHOWN_ANSWERS = 2


@click.command("demo")
@click.option("--seed", type=int, default=42, show_default=True, help="Random seed.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=None,
    help="Number of training steps; by default, that of the demo template.",
)
@click.option("--log-dir", default="logs/demo", show_default=True, help="Folder for logs and checkpoints.")
def command(seed: int, steps: int | None, log_dir: str) -> int:
    """Train the built-in model on the built-in task: CPU only, offline, two to four minutes on two cores."""
    overrides = dict(TEMPLATES["demo"].values)
    overrides |= {"training.seed": seed, "logging.log_dir": log_dir, "backend.adapter_path": f"{log_dir}/adapter"}
    if steps is not None:
        overrides["training.max_steps"] = steps
    config = load_config(None, overrides)
    from retrain.trainer import train  # noqa: PLC0415  (loads PyTorch)

    started = time.perf_counter()
    result = train(config)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    rates = [json.loads(line)["correct_rate"] for line in (Path(log_dir) / "metrics.jsonl").read_text().splitlines()]
    click.echo(f"\nTraining accuracy, {plural(len(rates), 'step')} in {minutes} min {seconds} s:")
    click.echo("\n".join(draw_chart(rates)))
    assert result.first_evaluation is not None and result.last_evaluation is not None
    print_evaluations(result.first_evaluation, result.last_evaluation)
    click.echo(f"\nLogs and checkpoints are in {log_dir}. Next steps:")
    # `make demo` does not activate its virtual environment.
    program = "retrain" if shutil.which("retrain") else os.path.relpath(Path(sys.executable).with_name("retrain"))
    for line in (
        f"{f'retrain ui {shlex.quote(log_dir)}':<51}# the report, with every completion",
        "retrain demo --seed 7                              # repeat with another seed",
        f"{f'retrain --resume {log_dir} --max-steps 80':<51}# resume and train longer",
        "retrain init my_run.toml --template demo           # this run as a file to edit",
        "retrain explain my_run.toml                        # what it would do",
        "retrain man --topic quickstart                     # train a larger model, write a reward",
    ):
        click.echo(f"  {line.replace('retrain', program, 1)}")
    return 0


def print_evaluations(before: Evaluation, after: Evaluation) -> None:
    """Print held-out accuracy before and after training, with a few answers that became correct."""
    click.echo(f"\nHeld-out accuracy ({plural(len(before.correct), 'problem')} not trained on, 95% interval):")
    for name, evaluation in (("before", before), ("after ", after)):
        low, high = evaluation.interval
        click.echo(f"  {name} {100 * evaluation.pass_at_1:5.1f}%   ({100 * low:.1f} to {100 * high:.1f})")
    fixed = [i for i, (was, now) in enumerate(zip(before.correct, after.correct, strict=True)) if now and not was]
    # Those first whose answer was wrong, not only without the box that scoring looks for.
    for index in sorted(fixed, key=lambda index: _has_answer(*before.answers[index]))[:SHOWN_ANSWERS]:
        example, first = before.answers[index]
        note = "   (right, but not in a box)" if _has_answer(example, first) else ""
        click.echo(f"\n  {example.prompt}   (answer: {example.reference})")
        click.echo(f"    before: {_one_line(first)}{note}\n    after:  {_one_line(after.answers[index][1])}")


def _has_answer(example: Example, text: str) -> bool:
    return example.reference in re.findall(r"-?\d+", text)


def draw_chart(rates: Sequence[float]) -> list[str]:
    """A bar chart with one column per step, or per mean of several steps."""
    columns = min(CHART_COLUMNS, len(rates))
    edges = [round(index * len(rates) / columns) for index in range(columns + 1)]
    means = [sum(rates[a:b]) / (b - a) for a, b in pairwise(edges)]
    eighths = " ▁▂▃▄▅▆▇█"
    rows = []
    for row in reversed(range(CHART_ROWS)):
        filled = [min(8, max(0, round((mean * CHART_ROWS - row) * 8))) for mean in means]
        label = f"{100 * (row + 1) // CHART_ROWS:4d}% " if (row + 1) % 5 == 0 else "      "
        rows.append(f"{label}│{''.join(eighths[level] for level in filled)}")
    return [*rows, f"   0% └{'─' * columns}"]


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else f"{flat[:97]}..."
