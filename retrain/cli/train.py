"""`retrain [config.toml] [--flags]`: load and check a configuration, and run it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.analysis.health import help_line
from retrain.checks.connections import announce_wait
from retrain.checks.preflight import check_before_loading
from retrain.checks.processes import check_multi_process, check_single_process
from retrain.checks.unsupported import check_supported
from retrain.cli import suggest_command
from retrain.cli.console import can_ask, confirm_starter
from retrain.cli.health import print_health
from retrain.config import TrainConfig, find_notes
from retrain.config.flags import click_options, load_with_flags, naming_flags, overrides_from
from retrain.config.options import options_by_path
from retrain.config.toml import show_value
from retrain.errors import ConfigError, RetrainError
from retrain.runtime.interrupts import INTERRUPTED
from retrain.runtime.ranks import RankInfo, find_rank_info
from retrain.runtime.text import plural, shorten_path

if TYPE_CHECKING:
    from retrain.trainer import TrainResult

DEFAULT_FILE = "retrain.toml"


class _Context(click.Context):
    """Shows the usage as typed: training has no command name."""

    @property
    def command_path(self) -> str:
        return "retrain"


class _Train(click.Command):
    context_class = _Context


strict_option = click.option(
    "--strict", is_flag=True, help="Treat options that are set but not used as errors instead of notes."
)


@click.command("retrain", cls=_Train, short_help="Train.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--force-resume", is_flag=True, help="Resume even if the configuration differs from that of the run.")
@strict_option
def command(config: str | None, force_resume: bool, strict: bool, **parameters: object) -> int:
    """Train from CONFIG (default: ./retrain.toml)."""
    rank_info = find_rank_info()
    path, loaded = read_config(config, parameters, strict=strict, show=rank_info is None or rank_info.is_main)
    if loaded.kind == "campaign":
        if rank_info is not None:
            check_multi_process(loaded)
        from retrain.campaign.run import run_campaign  # noqa: PLC0415  (only a campaign needs it)

        return run_campaign(loaded, force_resume, str(path))
    with naming_flags(overrides_from(parameters)):
        return run_config(loaded, force_resume)


command.params.extend(click_options())


def read_config(
    given: str | None, parameters: dict[str, object], as_json: bool = False, strict: bool = False, show: bool = True
) -> tuple[Path, TrainConfig]:
    """The configuration that a command line names, with its flags applied, and the file it comes from."""
    load_environment(announce=not as_json)
    overrides = overrides_from(parameters)
    path = find_config(given, overrides)
    config = load_with_flags(path, overrides, strict)
    if show:
        show_notes(config, overrides)
    return path, config


def show_notes(config: TrainConfig, given: Collection[str] = ()) -> None:
    """Print a line for each option that is set, or given as a flag, but not used."""
    for note in find_notes(config, given):
        _echo(f"note: {note}", err=True)


def load_environment(announce: bool = True) -> None:
    """Load ./.env into the environment; variables that are already set take precedence."""
    if not Path(".env").is_file():
        return
    from dotenv import load_dotenv  # noqa: PLC0415  (only when there is something to read)

    try:
        found = load_dotenv(".env", override=False)
    except (UnicodeDecodeError, ValueError, OSError) as error:
        raise ConfigError(f"./.env cannot be read: {error}.  Try: lines of KEY=value in UTF-8") from error
    if found and announce:
        _echo("Loaded .env")


def _restore(folder: Path) -> None:
    from retrain.storage.folder import restore_config  # noqa: PLC0415  (rarely needed)

    restore_config(folder, _echo)


def find_config(given: str | None, overrides: dict[str, object]) -> Path:
    """The given file, that of the run when resuming, else ./retrain.toml."""
    resumed = overrides.get("resume.from")
    if resumed == "":
        raise ConfigError("--resume needs a folder.  Try: --resume logs/train")
    own = Path(str(resumed)).expanduser() / "config.toml"
    if given is not None and not (resumed and os.path.abspath(given) == os.path.abspath(own)):
        path = Path(given)
        # A link to nothing is there; reading it says what is wrong.
        if not os.path.lexists(path):
            hint = suggest_command(given)
            if hint or not path.suffix:
                raise ConfigError(f"there is no file or command {given!r}.  {hint or 'Try: retrain --help'}")
        if os.path.isfile(path / "config.toml"):
            typed = click.get_current_context().command_path
            arguments = f"--resume {given}" if typed == "retrain" else path / "config.toml"
            raise ConfigError(f"{given} is the folder of a run, not a TOML file.  Try: {typed} {arguments}")
        # A folder that may not be entered is explained later.
        if resumed and os.path.isdir(own.parent / "checkpoints") and not os.path.isfile(own):
            _restore(own.parent)
        return path
    if resumed:
        path = own
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {resumed} to resume from.")
        if not path.is_file():
            _restore(path.parent)
        # A link such as logs/latest may lead to another run tomorrow.
        log_dir = str(path.parent.resolve()) if path.parent.is_symlink() else resumed
        overrides.setdefault("logging.log_dir", log_dir)
        from retrain.storage.moved import find_moved_inputs  # noqa: PLC0415  (only needed here)

        moved = {option: value for option, value in find_moved_inputs(path).items() if option not in overrides}
        for option, value in moved.items():
            where = options_by_path()[option].where
            _echo(f"note: {where} is now {show_value(value)}: what {path} names is gone", err=True)
        overrides |= moved
        return path
    path = Path(DEFAULT_FILE)
    if not path.exists() and not (can_ask() and confirm_starter(path)):
        raise ConfigError(f"there is no ./{DEFAULT_FILE}.  Try: retrain init, or name a file: retrain my_run.toml")
    return path


def run_config(config: TrainConfig, force_resume: bool = False) -> int:
    """Run a configuration: training or a LoRA rank analysis."""
    check_supported(config)
    rank_info = find_rank_info()
    if rank_info is not None:
        check_multi_process(config)
    elif config.kind == "train":
        check_single_process(config)
    if config.squeeze is not None and config.kind == "squeeze":
        if force_resume or config.resume.from_:
            raise ConfigError("a [squeeze] file analyzes an adapter; there is no run to resume.")
        from retrain.squeeze import squeeze  # noqa: PLC0415  (loads PyTorch)

        rank = config.model.lora_rank
        # A file with only [squeeze] has the default, which says nothing about the adapter.
        is_set = rank != options_by_path()["model.lora_rank"].default
        squeeze(config.squeeze, _echo, rank if is_set else 0, config.model.base_url)
        return 0
    if force_resume and not config.resume.from_:
        _echo("Note: --force-resume is not used: there is no --resume.")
    if text := explain_finished(config):
        _echo(text)
        return 0
    # Before PyTorch is imported, which takes seconds; runs from Python check it too.
    check_before_loading(config, _echo)
    announce_wait(config, _echo)
    started = time.time()
    try:
        result = _train(config, force_resume, rank_info)
    except KeyboardInterrupt:
        _echo(f"Interrupted. {resume_hint(config, started)}".rstrip(), err=True)
        return INTERRUPTED
    except Exception as error:
        # Invalid input would be rejected again; other failures may be transient.
        hint = resume_hint(config, started)
        if hint and not isinstance(error, RetrainError):
            error.add_note(hint)
        elif isinstance(error, RetrainError) and error.exit_code == RetrainError.exit_code:
            error.next_step = hint
        raise
    evaluation = result.last_evaluation
    has_rate = evaluation is not None and evaluation.has_scores
    held_out = f", held-out {100 * evaluation.pass_at_1:.1f}%" if evaluation and has_rate else ""
    given = Path(config.backend.adapter_path).expanduser()
    # A run works with absolute paths; the user is shown the path as configured.
    adapter = given if result.adapter == given.absolute() else result.adapter
    what = "adapter" if config.model.lora_rank else "model"
    where = f", {what} in {shorten_path(adapter)}" if adapter is not None else ""
    where = f", weights in {result.weights}" if result.weights else where
    _echo(f"Done: {plural(result.steps, 'step')}{held_out}, logs in {result.log_dir}{where}.")
    show_health(Path(result.log_dir))
    return 0


def explain_finished(config: TrainConfig) -> str:
    """Why there is nothing to resume and how to continue, or ""."""
    if not config.resume.from_:
        return ""
    from retrain.campaign.progress import finished_steps, read_progress  # noqa: PLC0415  (only a resume needs it)
    from retrain.storage.folder import has_work_left  # noqa: PLC0415

    folder = Path(config.resume.from_).expanduser()
    steps, progress = finished_steps(folder), read_progress(folder, checks=False)
    # Rows beyond the last checkpoint are removed by a resume.
    if steps != progress.step or has_work_left(config, steps):
        return ""
    held_out = f", held-out {100 * progress.held_out:.1f}%" if progress.held_out is not None else ""
    longer = f"--epochs {2 * config.training.epochs:g}" if config.training.epochs else f"--max-steps {2 * steps}"
    return (
        f"{folder} is finished: {plural(steps, 'step')}{held_out}.\n"
        f"To train longer: retrain --resume {shlex.quote(str(folder))} {longer}"
    )


def show_health(log_dir: Path) -> None:
    """Print what is wrong with a run, if anything, and the command that shows it."""
    from retrain.campaign.progress import read_progress  # noqa: PLC0415  (only at the end of a run)

    health = read_progress(log_dir).health
    with suppress(OSError):  # the output may be closed
        print_health("Health: ", health)
    if text := help_line(health):
        _echo(text)
    _echo(f"To view it: retrain ui {shlex.quote(str(log_dir))}")


def _train(config: TrainConfig, force_resume: bool, rank_info: RankInfo | None) -> TrainResult:
    # Imported here: an invalid file must fail before PyTorch loads, and a run on a service needs no PyTorch.
    if rank_info is None:
        from retrain.trainer import train  # noqa: PLC0415

        return train(config, force_resume)
    from retrain.distributed.run import train_on_ranks  # noqa: PLC0415

    return train_on_ranks(config, rank_info, force_resume)


def resume_hint(config: TrainConfig, started: float) -> str:
    """The command that resumes the run, or "" if it saved nothing."""
    from retrain.storage.checkpoint import Checkpoints  # noqa: PLC0415  (only a run that ended early needs it)

    log_dir = Path(config.logging.log_dir).expanduser()
    checkpoints = Checkpoints(log_dir, 1, _echo)
    saved = checkpoints.steps()
    # A run that ended before it began has touched nothing: the checkpoints may be an earlier run's.
    if not config.resume.from_ and not any(checkpoints.path_of(step).stat().st_mtime >= started for step in saved):
        return ""
    rank_info = find_rank_info()
    command = f"retrain launch --processes {rank_info.world}" if rank_info is not None else "retrain"
    return f"To resume: {command} --resume {shlex.quote(str(log_dir))}" if saved else ""


def _echo(line: str, err: bool = False) -> None:
    """Print a line; a closed output does not fail the run."""
    try:
        click.echo(line, err=err)
    except OSError:
        # Otherwise flushing the buffer at exit would fail again.
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
