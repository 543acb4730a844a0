"""Console output and prompts shared by the commands: tables, JSON, confirmation."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

import click

from retrain.errors import ConfigError

# Styles of status words.
MARKS = {
    "ok": "green", "warning": "yellow", "problem": "bold red", "missing": "bold red", "broken": "bold red",
    "shadowed": "yellow",
}  # fmt: skip


# Seconds of silence after which a command says what it is doing.
SLOW_S = 2.0


class FiniteRange(click.FloatRange):
    """A number in a range. To click, nan is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails for what is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(number)


@contextmanager
def announce_if_slow(line: str) -> Iterator[None]:
    """Print a line on standard error if what is inside takes more than a moment."""
    timer = threading.Timer(SLOW_S, click.echo, [line], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def can_ask() -> bool:
    """Whether the session is interactive."""
    # Either is None when the program was started with it closed.
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and not os.environ.get("CI")


def terminal_width() -> int | None:
    """The number of columns of the terminal; None in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_line(text: str) -> None:
    """Print a line, on a terminal wrapped at words with its continuation indented; in a pipe as it is."""
    width, start = terminal_width(), len(text) - len(text.lstrip())
    click.echo(fill(text, width, subsequent_indent=" " * (start + 2), break_on_hyphens=False) if width else text)


def print_heading(text: str) -> None:
    """Print a section heading; bold on a terminal."""
    if not sys.stdout.isatty():
        click.echo(f"\n{text}")
        return
    from rich.console import Console  # noqa: PLC0415  (only needed on a terminal)
    from rich.text import Text  # noqa: PLC0415

    Console().print(Text(f"\n{text}", style="bold"))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], header: bool = False) -> None:
    """Print a table on a terminal, aligned plain lines in a pipe, there with the columns' names if `header`."""
    if sys.stdout.isatty():
        _print_rich_table(columns, rows)
        return
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    for row in (columns, *rows) if header else rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box  # noqa: PLC0415  (only needed on a terminal)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # Padding on one side only, and no column without values: most tables then fit 80 columns.
    kept = [at for at in range(len(columns)) if not rows or any(row[at] != "-" for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for at in kept:
        table.add_column(columns[at], overflow="fold")
    for row in ([cells[at] for at in kept] for cells in rows):
        # Text, because brackets such as [training] must not be parsed as markup.
        table.add_row(*(Text(cell, style=MARKS.get(cell, "")) for cell in row))
    Console().print(table)


def print_json(data: object) -> None:
    """Print indented JSON."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))  # JSON has no dates, which TOML has


def confirm_overwrite(path: Path, force: bool) -> None:
    """Raise unless `path` may be written."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder.  Try: {path / 'retrain.toml'}")
    if force or not path.exists():
        return
    if not can_ask():
        raise ConfigError(f"{path} exists and was not changed.  Try: another name, or --force to replace it.")
    if not click.confirm(f"{path} exists. Replace it?", default=False):
        raise ConfigError(f"{path} was not changed.")


def confirm_starter(path: Path) -> bool:
    """Offer to write a quickstart file at `path`; True when it was written."""
    if not click.confirm(f"There is no {path} here. Write a quickstart configuration?", default=True):
        return False
    from retrain.config.reference import starter, write_with_schema  # noqa: PLC0415  (only when confirmed)

    write_with_schema(path, starter("quickstart"))
    click.echo(f"Wrote {path}. `retrain explain` shows what it does.")
    return True
