"""What a campaign shows while it runs: a live table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from retrain.analysis.health import overall, worst
from retrain.campaign.progress import RunProgress, describe_done
from retrain.tracking.console import PLAIN_EVERY_S

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

COLUMNS = ("run", "state", "step", "ETA", "correct", "held-out", "health", "idle")
LIVE_EVERY_S = 1.0
_ORDER = {"running": 0, "failed": 1, "interrupted": 2, "finished": 3, "skipped": 4, "pending": 5}
_STYLES = {
    "running": "bold",
    "loading": "bold",
    "evaluating": "bold",
    "failed": "bold red",
    "dead": "bold red",
    "interrupted": "yellow",
    "finished": "green",
}


class Screen:
    """Prints lines, and on a terminal keeps a table of the runs below them."""

    def __init__(self) -> None:
        self.live: Live | None = None
        self.drawn_at = -PLAIN_EVERY_S
        self.shown: dict[str, int] = {}

    def __enter__(self) -> Screen:
        if sys.stdout is not None and sys.stdout.isatty():
            from rich.live import Live  # noqa: PLC0415  (only needed on a terminal)

            self.live = Live(auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    @property
    def width(self) -> int | None:
        """The number of columns of the terminal; None in a pipe."""
        return self.live.console.width if self.live is not None else None

    def log(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        if self.live is not None:
            self.live.console.print(line, markup=False, highlight=False)
            return
        try:
            click.echo(line)
        except OSError:
            # The output was closed; the campaign continues.
            sys.stdout = open("/dev/null", "w")  # noqa: SIM115  (for as long as the program lives)

    def is_due(self) -> bool:
        """Whether the display should be updated."""
        return time.monotonic() - self.drawn_at >= (LIVE_EVERY_S if self.live is not None else PLAIN_EVERY_S)

    def show(self, runs: Mapping[str, RunProgress], left_seconds: float | None) -> None:
        """Show the progress of the runs."""
        self.drawn_at = time.monotonic()
        is_active = any(run.status == "running" for run in runs.values())
        eta = f", ETA {format_seconds(left_seconds)}" if is_active else ""
        summary = f"{describe_done(runs.values())}{eta}"
        if self.live is not None:
            rows = sorted(runs.items(), key=lambda item: _ORDER.get(item[1].status, 0))
            self.live.update(draw_table([(name, *cells(run)) for name, run in rows], summary), refresh=True)
            return
        running = [(name, run) for name, run in runs.items() if run.status == "running"]
        for name, run in running:
            # Print only changes to a pipe.
            if run.step > self.shown.get(name, 0):
                self.shown[name] = run.step
                step, eta, correct = cells(run)[1:4]
                # A run that evaluates has no steps left.
                left = f", ETA {eta}" if run.eta_seconds is not None else ""
                self.log(f"  {name}: step {step}, correct {correct}{left}")
        if running:
            self.log(f"  {summary}")


def cells(run: RunProgress) -> tuple[str, ...]:
    """State, step, ETA, correct rate, held-out rate, health and time since the last step ("idle"), as table cells."""
    bad = worst(run.health)
    return (
        run.state,
        f"{run.step}/{run.max_steps}" if run.max_steps is not None else str(run.step),
        format_seconds(run.eta_seconds) if run.status == "running" else "-",
        format_rate(run.correct_rate),
        format_rate(run.held_out),
        f"{bad.level}: {bad.name}" if bad else overall(run.health),
        format_seconds(run.quiet_seconds) if run.quiet_seconds is not None else "-",
    )


def draw_table(rows: Sequence[Sequence[str]], caption: str) -> Table:
    """The rows as a rich table."""
    from rich import box  # noqa: PLC0415  (only needed on a terminal)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table


def format_rate(rate: float | None) -> str:
    """A rate in percent."""
    return "-" if rate is None else f"{100 * rate:.1f}%"


def format_seconds(seconds: float | None) -> str:
    """A rounded duration."""
    if seconds is None:
        return "unknown"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
