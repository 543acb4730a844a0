"""`retrain distributed init`: configurations and scripts for multi-process runs."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.cli.console import confirm_overwrite
from retrain.distributed.starters import starter_files
from retrain.errors import ConfigError


@click.group("distributed")
def command() -> None:
    """Write configuration files for accelerate, torchrun and Slurm. `retrain launch` needs none of them."""


@command.command("init", short_help="Write files for accelerate, torchrun and Slurm.")
@click.argument("folder", default="distributed", type=click.Path(file_okay=False, path_type=Path))
@click.option("--processes", type=click.IntRange(min=2), default=2, show_default=True, help="Processes per machine.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(folder: Path, processes: int, force: bool) -> int:
    """Write accelerate configurations (DDP, FSDP2), a torchrun script and a Slurm script to FOLDER."""
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
    click.echo("The first lines of each file describe its use and the options it needs in config.toml.")
    return 0
