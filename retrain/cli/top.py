"""`retrain top`: `retrain status`, refreshed until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.analysis.health import worst
from retrain.campaign.screen import cells, draw_table
from retrain.cli.console import FiniteRange
from retrain.cli.health import health_parts
from retrain.cli.status import Entry, error_lines, find_entries, heading, print_entry, resume_line

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

NOTHING = "Nothing is running; --all includes runs that have ended."


@click.command("top")
@click.argument("logs", nargs=-1, type=click.Path())
@click.option(
    "--every", type=FiniteRange(0.1, 3600), default=2.0, show_default=True, help="Refresh interval in seconds."
)
@click.option("--all", "show_all", is_flag=True, help="Include runs that have ended.")
def command(logs: tuple[str, ...], every: float, show_all: bool) -> int:
    """Watch the live runs and campaigns in the folders LOGS (default: ./logs).

    If the output is not a terminal, they are listed once.
    """
    folders = [Path(folder).expanduser() for folder in logs or ("logs",)]
    if not sys.stdout.isatty():
        entries = choose(folders, show_all)
        for entry in entries:
            print_entry(entry)
        if not entries:
            click.echo(NOTHING)
        return 0
    from rich.live import Live  # noqa: PLC0415  (only needed on a terminal)

    with Live(draw(choose(folders, show_all)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(draw(choose(folders, show_all)), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            return 0


def choose(folders: Sequence[Path], show_all: bool) -> list[Entry]:
    """Running entries, or all of them, newest first."""
    entries = [entry for folder in folders for entry in find_entries(folder)]
    return [entry for entry in reversed(entries) if entry.live or show_all]


def draw(entries: Sequence[Entry]) -> ConsoleRenderable:
    """All entries, each with the runs that have started."""
    from rich.console import Group  # noqa: PLC0415  (only needed on a terminal)
    from rich.text import Text  # noqa: PLC0415

    if not entries:
        return Text(f"{NOTHING} Press Ctrl-C to quit.")
    parts: list[ConsoleRenderable] = []
    for entry in entries:
        rows = [(name, *cells(run)) for name, run in entry.runs.items() if run.status != "pending"]
        below = "\n".join(filter(None, [*error_lines(entry), resume_line(entry)]))
        parts += [Text(heading(entry), style="bold"), draw_table(rows, below)]
        parts += [
            Text.assemble(f"{name}: ", *health_parts(run.health))
            for name, run in entry.runs.items()
            if worst(run.health)
        ]
    return Group(*parts)
