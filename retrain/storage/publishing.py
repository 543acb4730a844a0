"""Publishing a folder of weights: all of it or nothing, and files that retrain did not write are never touched."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from retrain.types import JsonObject

RECORD = ".retrain_published.json"
"""Lists the files of the last publish, which are the only ones that the next publish may replace or delete, and says
which run they are of."""
README = "README.md"


def why_kept(target: Path) -> str:
    """What was named by mistake and is not replaced; "" for a free path, an empty folder and a run's adapter."""
    if target.is_dir():
        if not any(target.iterdir()):
            return ""
        if not (target / RECORD).is_file():
            return "holds files that retrain did not write"
        # Older records do not tell.
        return "holds an adapter that no run wrote" if _read_record(target).get("run") == "" else ""
    return "is a file, not a folder" if target.exists() else ""


def other_run(target: Path, run: Path) -> str:
    """The folder of another run, still there, that published to `target`; empty if there is none."""
    other, own = publisher(target), run.resolve()
    is_own = not other or Path(other).resolve() == own or target.resolve().is_relative_to(own)
    return "" if is_own or not Path(other).is_dir() else other


def publisher(target: Path) -> str:
    """The folder of the run that published to `target`, as far as it is known."""
    return str(_read_record(target).get("run") or "")


def publish_folder(target: Path, fill: Callable[[Path], None], run: str = "") -> None:
    """Put what `fill` writes into a folder at `target`, in place of an earlier publish; other files there stay.
    A README.md that was written since, such as a card, becomes README.1.md if there is a new one.

    It is written beside its place, so a kill leaves the earlier weights; what such a kill left is deleted here.
    """
    target = target.resolve() if target.is_symlink() else target
    sweep_leftovers(target)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        fill(draft)
        if (draft / README).is_file() and (target / README).is_file() and _is_edited(target):
            os.rename(target / README, _free_name(target))
        record = {"run": run, "files": sorted(map(str, _files(draft)))}
        (draft / RECORD).write_text(json.dumps(record), encoding="utf-8")
        if (target.is_dir() and _files(target) - _published(target)) or os.path.ismount(target):
            _replace_files(target, draft)
        else:
            _swap(target, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep_leftovers(target: Path) -> None:
    """Delete drafts, and folders on their way out, of processes that are gone or of this one."""
    if not target.parent.is_dir():
        return
    name = re.escape(target.name)
    leftover = re.compile(rf"\.(?:{name}\.(?P<draft>\d+)|removing_{name}_(?P<old>\d+))")
    for path in target.parent.iterdir():
        match = leftover.fullmatch(path.name)
        if match is not None and not is_another_process(int(match["draft"] or match["old"])):
            shutil.rmtree(path, ignore_errors=True)


def make_temporary(kind: str) -> Path:
    """A new folder for temporary files; those of the same kind whose processes were killed are deleted."""
    for path in Path(tempfile.gettempdir()).glob(f"{kind}-*-*"):
        owner = path.name.removeprefix(f"{kind}-").partition("-")[0]
        # Two of one process may live side by side.
        if owner.isdecimal() and int(owner) != os.getpid() and not is_another_process(int(owner)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-"))


def is_another_process(pid: int) -> bool:
    """Whether a process other than this one has the number."""
    return pid != os.getpid() and is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process has the number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _published(target: Path) -> set[Path]:
    """The files of the last publish that are there, with its record; none where the record cannot be read."""
    names = _read_record(target).get("files")
    if not isinstance(names, list):
        return set()
    # A name that is absolute or leads out of the folder is none of its files.
    return {Path(RECORD), *(Path(name) for name in names if isinstance(name, str))} & _files(target)


def _is_edited(target: Path) -> bool:
    """Whether the README.md of a folder is not that of the last publish, whose record was written after it."""
    if Path(README) not in _published(target):
        return True
    return (target / README).stat().st_mtime_ns > (target / RECORD).stat().st_mtime_ns


def _free_name(target: Path) -> Path:
    names = (target / f"README.{number}.md" for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _read_record(target: Path) -> JsonObject:
    try:
        record = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A list of the files was all of it once.
    return record if isinstance(record, dict) else {"files": record}


def _swap(target: Path, draft: Path) -> None:
    # A folder cannot be renamed over one that holds files, so the old one steps aside first.
    aside = target.with_name(f".removing_{target.name}_{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, aside)
    os.rename(draft, target)
    shutil.rmtree(aside, ignore_errors=True)


def _replace_files(target: Path, draft: Path) -> None:
    """One file after the other, where the folder holds other files too or is a mount point, which cannot be renamed."""
    new, old = _files(draft), _published(target)
    # The record goes first: a file that is there and not on it would never be replaced again.
    for path in sorted(new, key=lambda path: (path != Path(RECORD), path)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _move(draft / path, target / path)
    for path in old - new:
        (target / path).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Replace a file, also across file systems."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy2(source, beside)
        os.replace(beside, target)
