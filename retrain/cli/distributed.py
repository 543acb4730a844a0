"""`retrain distributed init`: configurations and scripts for runs of several processes."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.cli.console import confirm_overwrite
from retrain.distributed.starters import starter_files
from retrain.errors import ConfigError


@click.group("distributed")
def command() -> None:
    """Runs of several processes started by accelerate, torchrun or Slurm. `retrain launch` needs none of these."""


@command.command("init")
@click.argument("folder", default="distributed", type=click.Path(file_okay=False, path_type=Path))
@click.option("--processes", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks on a machine.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def init(folder: Path, processes: int, force: bool) -> int:
    """Write accelerate configurations (DDP, FSDP2, ZeRO 1 and 3), a torchrun script and a Slurm script to FOLDER."""
    files = starter_files(folder, processes)
    for name in files:
        confirm_overwrite(folder / name, force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            click.echo(f"Wrote {folder / name}")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}.") from error
    click.echo("Each says in its first lines how to use it and what config.toml must say.")
    return 0
