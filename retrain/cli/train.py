"""`retrain [config.toml] [--flags]`: load, check, and run what the file describes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrain.checks.preflight import check_before_loading
from retrain.cli import suggest_command
from retrain.cli.console import can_ask, confirm_starter
from retrain.config import TrainConfig, find_notes, load_config
from retrain.config.absent import refuse_absent_parts
from retrain.config.flags import click_options, overrides_from
from retrain.errors import ConfigError, RetrainError
from retrain.runtime.ranks import Place, find_place, refuse_alone, refuse_on_ranks
from retrain.storage.publishing import RECORD

if TYPE_CHECKING:
    from retrain.trainer import TrainResult

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
@click.option("--strict", is_flag=True, help="Refuse options that are set and not used, which otherwise get a note.")
def command(config: str | None, force_resume: bool, strict: bool, **parameters: Any) -> int:
    """Train from CONFIG (./retrain.toml when it is left out)."""
    load_environment()
    overrides = overrides_from(parameters)
    path = find_config(config, overrides)
    loaded = load_config(path, overrides, strict)
    place = find_place()
    if place is None or place.leads:
        show_notes(loaded)
    if loaded.kind == "campaign":
        if place is not None:
            refuse_on_ranks(loaded)
        from retrain.campaign.run import run_campaign  # noqa: PLC0415  (only a campaign needs it)

        return run_campaign(loaded, force_resume, str(path))
    return run_config(loaded, force_resume)


command.params.extend(click_options())


def show_notes(config: TrainConfig) -> None:
    """One line for each option that is set and not used."""
    for note in find_notes(config):
        _say(f"note: {note}", err=True)


def load_environment(announce: bool = True) -> None:
    """Read ./.env into the environment, under what is already there; say so unless a program reads our output."""
    if not Path(".env").is_file():
        return
    from dotenv import load_dotenv  # noqa: PLC0415  (only when there is something to read)

    try:
        found = load_dotenv(".env", override=False)
    except (UnicodeDecodeError, ValueError, OSError) as error:
        raise ConfigError(f"./.env cannot be read: {error}.  Try: lines of KEY=value in UTF-8") from error
    if found and announce:
        _say("Loaded .env")


def find_config(given: str | None, overrides: dict[str, Any]) -> Path:
    """The file the user named, the run's own when resuming, else ./retrain.toml."""
    if overrides.get("resume.from") == "":
        raise ConfigError("--resume was given no folder.  Try: --resume logs/train")
    if given is not None:
        path = Path(given)
        if not os.path.exists(path) and suggest_command(given):
            raise ConfigError(f"there is no file or command {given!r}.  {suggest_command(given)}")
        return path
    resumed = overrides.get("resume.from")
    if resumed:
        path = Path(resumed).expanduser() / "config.toml"
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {resumed} to resume from.")
        if not path.is_file():
            raise ConfigError(
                f"{resumed} has no config.toml to resume with.  Try: retrain your.toml --resume {resumed}"
            )
        overrides.setdefault("logging.log_dir", resumed)
        return path
    path = Path(DEFAULT_FILE)
    if not path.exists() and not (can_ask() and confirm_starter(path)):
        raise ConfigError(f"there is no ./{DEFAULT_FILE}.  Try: retrain init, or name a file: retrain my_run.toml")
    return path


def run_config(config: TrainConfig, force_resume: bool = False) -> int:
    """Run what the file describes."""
    refuse_absent_parts(config)
    place = find_place()
    if place is not None:
        refuse_on_ranks(config)
    elif config.kind == "train":
        refuse_alone(config)
    if config.squeeze is not None and config.kind == "squeeze":
        if force_resume or config.resume.from_:
            raise ConfigError("a [squeeze] file analyses an adapter; there is no run to resume.")
        from retrain.squeeze import squeeze  # noqa: PLC0415  (loads PyTorch)

        squeeze(config.squeeze, _say, config.model.lora_rank, config.model.base_url)
        return 0
    # Before PyTorch is imported, which takes seconds; a run from Python checks it too.
    check_before_loading(config, _say)
    try:
        result = _train(config, force_resume, place)
    except KeyboardInterrupt:
        _say(f"Interrupted. {how_to_go_on(config)}".rstrip(), err=True)
        return 130
    except Exception as error:
        # Below the message. Wrong input would be refused again; anything else may have been a bad day.
        hint = how_to_go_on(config)
        if hint and not isinstance(error, RetrainError):
            error.add_note(hint)
        elif isinstance(error, RetrainError) and error.exit_code == RetrainError.exit_code:
            error.next_step = hint
        raise
    evaluation = result.last_evaluation
    held_out = f", held-out {100 * evaluation.pass_at_1:.1f}%" if evaluation is not None else ""
    adapter = Path(config.backend.adapter_path).expanduser()
    if not (adapter / RECORD).is_file():
        adapter = Path(result.log_dir) / "checkpoints" / f"step_{result.steps:06d}" / "adapter"
    where = f", {'adapter' if config.model.lora_rank else 'model'} in {adapter}" if adapter.is_dir() else ""
    where = f", weights in {result.weights}" if result.weights else where
    _say(f"Done: {result.steps} steps{held_out}, logs in {result.log_dir}{where}.")
    return 0


def _train(config: TrainConfig, force_resume: bool, place: Place | None) -> TrainResult:
    # Imported here: a wrong file must fail before PyTorch loads, and a run on a service has none.
    if place is None:
        from retrain.trainer import train  # noqa: PLC0415

        return train(config, force_resume)
    from retrain.distributed.run import train_on_ranks  # noqa: PLC0415

    return train_on_ranks(config, place, force_resume)


def how_to_go_on(config: TrainConfig) -> str:
    """The command that resumes the run, or "" when nothing was saved yet."""
    log_dir = Path(config.logging.log_dir).expanduser()
    saved = (log_dir / "trainer_state.json").exists()
    place = find_place()
    command = f"retrain launch --processes {place.world}" if place is not None else "retrain"
    return f"To go on: {command} --resume {shlex.quote(str(log_dir))}" if saved else ""


def _say(line: str, err: bool = False) -> None:
    """Print a line, if anybody is listening still; a run does not fail for want of a listener."""
    try:
        click.echo(line, err=err)
    except OSError:
        # Or what is still buffered would fail the program once more as it exits.
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
