"""A log folder before a run begins in it: an earlier run is set aside, and files that retrain did not write stay."""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from pathlib import Path

from retrain.config import dump_config
from retrain.config.load import parse_recorded
from retrain.errors import ConfigError
from retrain.runtime.text import list_some
from retrain.storage.checkpoint import STATE_FILE
from retrain.storage.logs import EVAL_PROBLEMS, FILES, MANIFEST, METRICS, has_step, parse_rows
from retrain.storage.publishing import RECORD

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
# Contents of a folder with a run.
RUN_FILES = (STATE_FILE, *FILES, EVAL_PROBLEMS, "checkpoints", "rollouts")
_WRITTEN = {CONFIG_FILE, MANIFEST, "runs", "shared.log", "stdout.log", "stderr.log", "wandb"} | {
    name.partition("/")[0] for name in RUN_FILES
}


def is_not_empty(path: Path) -> bool:
    """Whether there is a file or folder with contents."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def holds_run(folder: Path) -> bool:
    """Whether an earlier run or campaign would be overwritten."""
    return any(is_not_empty(folder / name) for name in (*RUN_FILES, MANIFEST))


def explain_occupied(folder: Path) -> str:
    """Why no run may begin in a folder; "" if it may.

    It would replace files that retrain did not write, or an earlier run there that cannot be set aside.
    """
    if _is_of_retrain(folder):
        is_stuck = holds_run(folder) and os.path.ismount(folder)
        return f"{folder} holds an earlier run, which cannot be renamed: it is a mount point" if is_stuck else ""
    theirs = [name for name in RUN_FILES if is_not_empty(folder / name)]
    theirs += [] if _is_own_config(folder / CONFIG_FILE) else [CONFIG_FILE]
    what = f"{list_some(theirs)}, which retrain did not write and a run would replace"
    return f"{folder} holds {what}" if theirs else ""


def require_unoccupied(folder: Path) -> None:
    """Raise if no run may begin in a folder."""
    if why := explain_occupied(folder):
        raise ConfigError(f"{why}.  Try: another --log-dir, such as {folder / 'run'}")


def step_aside(path: Path) -> tuple[Path, list[str]]:
    """Rename the folder of an earlier run or campaign; returns the new one and the names of what stays.

    Files that retrain did not write stay where they are, and so does the working directory.
    """
    path = path.absolute()
    try:
        # A name that is too long fails here already.
        number = next(n for n in range(1, 1_000_000) if not Path(f"{path}.{n}").exists())
        aside = Path(f"{path}.{number}")
        stays = sorted(entry.name for entry in path.iterdir() if not _is_own(entry) and entry.name != LOCK_FILE)
        if stays or Path.cwd().is_relative_to(path.resolve()):
            _move_out(path, aside)
        else:
            os.rename(path, aside)
    except OSError as error:
        raise ConfigError(
            f"{path} holds an earlier run and cannot be renamed ({error.strerror}).  Try: another --log-dir"
        ) from error
    return aside, stays


def _is_of_retrain(folder: Path) -> bool:
    """Whether a run has begun in a folder. A copy may lack the lock, and logs the checkpoints."""
    marks = [folder / name for name in (LOCK_FILE, MANIFEST, STATE_FILE)]
    if any(mark.exists() for mark in marks) or any(folder.glob("checkpoints/step_*")):
        return True
    try:
        with (folder / METRICS).open("rb") as file:
            return any(map(has_step, parse_rows(islice(file, 1))))
    except OSError:
        return False


def _move_out(path: Path, aside: Path) -> None:
    """Move what retrain wrote into a new folder: all of it or nothing."""
    aside.mkdir()
    moved: list[Path] = []
    try:
        for entry in filter(_is_own, list(path.iterdir())):
            os.rename(entry, aside / entry.name)
            moved.append(entry)
    except OSError:
        for entry in moved:
            os.rename(aside / entry.name, entry)
        with contextlib.suppress(OSError):
            aside.rmdir()
        raise


def _is_own(entry: Path) -> bool:
    return entry.name in _WRITTEN or (entry / RECORD).is_file()


def _is_own_config(path: Path) -> bool:
    """Whether a config.toml, if there is one, is as retrain writes it; the next one then has the same contents."""
    if not is_not_empty(path):
        return True
    try:
        text = path.read_text(encoding="utf-8")
        return dump_config(parse_recorded(text, str(path))) == text
    except (OSError, ValueError, ConfigError):
        return False
