"""`retrain [config.toml] [--flags]`: load, check, and run what the file describes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from retrain.cli import suggest_command
from retrain.cli.console import confirm_starter
from retrain.config import TrainConfig, load_config
from retrain.config.absent import refuse_absent_parts
from retrain.config.flags import click_options, overrides_from
from retrain.errors import BackendError, CheckpointError, ConfigError, RetrainError, RolloutError

DEFAULT_FILE = "retrain.toml"


class _Context(click.Context):
    """Shows the usage as it was typed: training has no word of its own."""

    @property
    def command_path(self) -> str:
        return "retrain"


class _Train(click.Command):
    context_class = _Context


@click.command("retrain", cls=_Train, short_help="Train.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--force-resume", is_flag=True, help="Resume although the configuration differs from the run's.")
def command(config: str | None, force_resume: bool, **parameters: Any) -> int:
    """Train from CONFIG (./retrain.toml when it is left out)."""
    load_environment()
    overrides = overrides_from(parameters)
    loaded = load_config(find_config(config, overrides), overrides)
    return run_config(loaded, force_resume)


command.params.extend(click_options())


def load_environment(announce: bool = True) -> None:
    """Read ./.env into the environment, under what is already there; say so unless a program reads our output."""
    if not Path(".env").is_file():
        return
    from dotenv import load_dotenv  # noqa: PLC0415  (only when there is something to read)

    if load_dotenv(".env", override=False) and announce:
        click.echo("Loaded .env")


def find_config(given: str | None, overrides: dict[str, Any]) -> Path:
    """The file the user named, the run's own when resuming, else ./retrain.toml."""
    if given is not None:
        path = Path(given)
        if not os.path.exists(path) and suggest_command(given):
            raise ConfigError(f"there is no file or command {given!r}.  {suggest_command(given)}")
        return path
    resumed = overrides.get("resume.from")
    if resumed:
        path = Path(resumed) / "config.toml"
        if not path.is_file():
            raise ConfigError(
                f"{resumed} has no config.toml to resume with.  Try: retrain your.toml --resume {resumed}"
            )
        overrides.setdefault("logging.log_dir", resumed)
        return path
    path = Path(DEFAULT_FILE)
    if not path.exists():
        interactive = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
        if not (interactive and confirm_starter(path)):
            raise ConfigError(f"there is no ./{DEFAULT_FILE}.  Try: retrain init, or name a file: retrain my_run.toml")
    return path


def run_config(config: TrainConfig, force_resume: bool = False) -> int:
    """Run what the file describes."""
    refuse_absent_parts(config)
    from retrain.trainer import train  # noqa: PLC0415  (loads PyTorch; a wrong file must fail before that)

    try:
        result = train(config, force_resume)
    except KeyboardInterrupt:
        click.echo(f"Interrupted. {how_to_go_on(config)}", err=True)
        return 130
    except (RolloutError, BackendError, CheckpointError) as error:
        # A resume that was refused would be refused again.
        if error.exit_code == RetrainError.exit_code and how_to_go_on(config):
            click.echo(how_to_go_on(config), err=True)
        raise
    click.echo(f"Done: {result.steps} steps, logs in {result.log_dir}, adapter in {config.backend.adapter_path}.")
    return 0


def how_to_go_on(config: TrainConfig) -> str:
    """The command that resumes the run, or "" when nothing was saved yet."""
    log_dir = config.logging.log_dir
    return f"To go on: retrain --resume {log_dir}" if (Path(log_dir) / "trainer_state.json").exists() else ""
