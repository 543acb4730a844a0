"""`retrain launch --processes N config.toml [--flags]`: one run in several processes on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.checks.preflight import check_before_loading
from retrain.checks.processes import check_multi_process
from retrain.checks.unsupported import check_supported
from retrain.cli import train
from retrain.distributed.launch import launch


@click.command("launch", context_settings={"ignore_unknown_options": True})
@click.option("--processes", type=click.IntRange(min=2), required=True, help="Number of processes, one per GPU.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG] [FLAGS]...")
def command(processes: int, arguments: tuple[str, ...]) -> int:
    """Train from CONFIG with several processes on this machine.

    CONFIG and FLAGS are the same as for `retrain CONFIG`. The output of rank 0 is printed; that of the other ranks is
    copied to `ranks/` in the log folder when the run ends. For several machines, use torchrun or Slurm: see
    `retrain distributed init`.
    """
    parameters = train.command.make_context("retrain", list(arguments)).params
    parameters.pop("force_resume")
    config, strict = parameters.pop("config"), parameters.pop("strict")
    # Rank 0 shows what it read.
    _, loaded = train.read_config(config, parameters, as_json=True, strict=strict, show=False)
    check_supported(loaded)
    check_multi_process(loaded, {})
    check_before_loading(loaded, click.echo)
    return launch(processes, arguments, Path(loaded.logging.log_dir).expanduser())
