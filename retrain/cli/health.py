"""The health checks of a run in one line of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

import click

from retrain.analysis.health import Check, strip
from retrain.cli.console import MARKS


def print_health(before: str, checks: Sequence[Check]) -> None:
    """Print the checks of a run in a line, if any is known."""
    parts = health_parts(checks)
    if not parts:
        return
    # It is None if the program was started with it closed.
    if sys.stdout is None or not sys.stdout.isatty():
        click.echo(before + "".join(text for text, _ in parts))
        return
    from rich.console import Console  # noqa: PLC0415  (only needed on a terminal)
    from rich.text import Text  # noqa: PLC0415

    Console().print(Text.assemble(before, *parts))


def health_parts(checks: Sequence[Check]) -> list[tuple[str, str]]:
    """The checks of a run by level, as in `problem: truncation 40%; ok: learning, entropy`: texts with their styles."""
    parts: list[tuple[str, str]] = []
    for level, group in groupby(strip(checks), key=lambda check: check[1]):
        parts.append((f"{'; ' if parts else ''}{level}: ", ""))
        for at, (text, _) in enumerate(group):
            parts += [(", " if at else "", ""), (text, MARKS[level])]
    return parts
