"""What the commands share: the console, and the offer to write a first configuration."""

from __future__ import annotations

from pathlib import Path

import click


def confirm_starter(path: Path) -> bool:
    """Offer to write a quickstart file at `path`; True when it was written."""
    if not click.confirm(f"There is no {path} here. Write a quickstart one?", default=True):
        return False
    from retrain.config.reference import starter  # noqa: PLC0415  (only when the user says yes)

    path.write_text(starter("quickstart"), encoding="utf-8")
    click.echo(f"Wrote {path}. `retrain explain` says what it does.")
    return True
