"""Numbers and paths as text: counts with the right plural, bytes, durations, short paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plural(count: int, noun: str, form: str = ",") -> str:
    """`1 step`, `2 steps`, `1,000 steps`; `form = "d"` writes 1000, for lines that other programs may read."""
    return f"{count:{form}} {noun if count == 1 else noun + 's'}"


def format_bytes(count: int | None) -> str:
    """Decimal gigabytes or megabytes."""
    if count is None:
        return "unknown"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def format_duration(seconds: float) -> str:
    """The duration in the largest unit of which there are at least two."""
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return "< 1 s" if 0 < seconds < 0.5 else f"{seconds:.0f} s"


def format_clock(seconds: float) -> str:
    """`1:20` or `2:03:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten_path(path: Path) -> str:
    """The path from the working directory if it is inside, as a user would type it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working directory has been deleted
        return str(path)
    return str(path.relative_to(here) if path != here and path.is_relative_to(here) else path)


def list_some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
