"""A log folder before a run begins in it: an earlier run is set aside, and files that are not part of it stay."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from retrain.config import dump_config
from retrain.config.load import parse_recorded
from retrain.errors import ConfigError
from retrain.runtime.text import list_some
from retrain.storage.checkpoint import MANIFEST as CHECKPOINT_MANIFEST
from retrain.storage.checkpoint import STATE_FILE, Checkpoints, read_state
from retrain.storage.logs import (
    CARD,
    EVAL_PROBLEMS,
    FILES,
    MANIFEST,
    METRICS,
    RANK_LOGS,
    REPORT,
    SERVER_LOG,
    SHARED_LOG,
    STDERR,
    STDOUT,
    TRACKIO_NAME,
    WANDB_ID,
    has_step,
    parse_rows,
)
from retrain.storage.publishing import RECORD, publisher

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
# Contents of a folder with a run.
RUN_FILES = (STATE_FILE, *FILES, EVAL_PROBLEMS, "checkpoints", "rollouts")
_BESIDE = (CONFIG_FILE, WANDB_ID, "wandb", TRACKIO_NAME, RANK_LOGS, REPORT, CARD, STDOUT, STDERR)
_OF_RUNS = {name.partition("/")[0] for name in (*RUN_FILES, *_BESIDE)}
_OF_CAMPAIGNS = _OF_RUNS | {MANIFEST, "runs", SHARED_LOG}
# The server of the run that begins has it open.
_KEPT = (LOCK_FILE, SERVER_LOG)


def is_not_empty(path: Path) -> bool:
    """Whether there is a file or folder with contents."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def holds_run(folder: Path) -> bool:
    """Whether an earlier run or campaign would be overwritten."""
    return any(is_not_empty(folder / name) for name in (*RUN_FILES, MANIFEST))


def _explain_occupied(folder: Path) -> str:
    """Why no run may begin in a folder; "" if it may.

    It would replace files that are no run's, or an earlier run there that cannot be set aside.
    """
    if is_of_run(folder) or _is_campaign(folder):
        place = folder.resolve()
        why = "it is a mount point" if os.path.ismount(place) else ""
        why = why or ("" if os.access(place.parent, os.W_OK) else f"{place.parent} cannot be written to")
        return f"{folder} holds an earlier run, which cannot be renamed: {why}" if why and holds_run(folder) else ""
    theirs = [name for name in (*RUN_FILES, MANIFEST) if is_not_empty(folder / name)]
    theirs += [] if _is_own_config(folder / CONFIG_FILE) else [CONFIG_FILE]
    return f"{folder} holds {list_some(theirs)}, not of a run, in the place of a run's files" if theirs else ""


def require_unoccupied(folder: Path) -> None:
    """Raise if no run may begin in a folder."""
    if why := _explain_occupied(folder):
        inside = f", such as {folder / 'run'}" if os.access(folder, os.W_OK) else ""
        raise ConfigError(f"{why}.  Try: another --log-dir{inside}")


def step_aside(path: Path, log: Callable[[str], None]) -> None:
    """Rename the folder of an earlier run or campaign.

    Files that are not part of it stay where they are, and so does the working directory.
    """
    path = path.absolute()
    is_campaign = (path / MANIFEST).exists()
    try:
        # A name that is too long fails here already.
        number = next(n for n in range(1, 1_000_000) if not Path(f"{path}.{n}").exists())
        aside = Path(f"{path}.{number}")
        names = _OF_CAMPAIGNS if is_campaign else _OF_RUNS
        entries = {entry.name: entry for entry in path.iterdir()}
        own = {name: entry for name, entry in entries.items() if name in names or _is_adapter(entry, path)}
        if entries.keys() <= {*own, LOCK_FILE} and not Path.cwd().is_relative_to(path.resolve()):
            os.rename(path, aside)
        else:
            _move_out(own.values(), aside)
    except OSError as error:
        raise ConfigError(
            f"{path} holds an earlier run and cannot be renamed ({error.strerror}).  Try: another --log-dir"
        ) from error
    held = "a campaign" if is_campaign else "an earlier run"
    can_resume = is_campaign or Checkpoints(aside, 1, log).steps()
    resume = f" (to resume it: --resume {aside})" if can_resume else ""
    stays = sorted(entries.keys() - own.keys() - set(_KEPT))
    others = f" Not moved, since it is not part of it: {list_some(stays)}." if stays else ""
    log(f"{path} held {held}; it is now {aside}{resume}.{others}")


def is_of_run(folder: Path) -> bool:
    """Whether a run of a configuration file has begun in a folder. A copy may lack logs or checkpoints."""
    # Other programs have files of these names, too, and `retrain grpo` has a lock.
    if "checkpoint" in read_state(folder) or any(folder.glob(f"checkpoints/step_*/{CHECKPOINT_MANIFEST}")):
        return True
    if is_not_empty(folder / CONFIG_FILE) and _is_own_config(folder / CONFIG_FILE):
        return True
    try:
        with (folder / METRICS).open("rb") as file:
            return any(has_step(row) and "condition" in row for row in parse_rows(islice(file, 1)))
    except OSError:
        return False


def _is_adapter(folder: Path, log_dir: Path) -> bool:
    """Whether a folder holds what the run in `log_dir`, or one that is no longer there, has published."""
    try:
        run = Path(publisher(folder))
        return (folder / RECORD).is_file() and (not run.is_dir() or run.resolve() == log_dir.resolve())
    except OSError:
        return False  # a private folder


def _is_campaign(folder: Path) -> bool:
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and {"format", "runs", "sessions"} <= table.keys()


def _move_out(entries: Iterable[Path], aside: Path) -> None:
    """Move all of them into a new folder, or none."""
    aside.mkdir()
    moved: list[Path] = []
    try:
        for entry in entries:
            os.rename(entry, aside / entry.name)
            moved.append(entry)
    except OSError:
        for entry in moved:
            os.rename(aside / entry.name, entry)
        with contextlib.suppress(OSError):
            aside.rmdir()
        raise


def _is_own_config(path: Path) -> bool:
    """Whether a config.toml, if there is one, is as retrain writes it; the next one then has the same contents."""
    if not is_not_empty(path):
        return True
    try:
        text = path.read_text(encoding="utf-8")
        return dump_config(parse_recorded(text, str(path))) == text
    except (OSError, ValueError, ConfigError):
        return False
