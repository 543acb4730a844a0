"""A folder of weights put where somebody asked for it: whole or not at all, and nothing of anybody else's is lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

MARKS = ("adapter_config.json", "retrain.json")
"""A folder with one of these holds weights that a run published: an adapter, or a model trained as a whole."""

# Weights under other names than the new ones, left by an earlier publish: a model cut into another number of files.
_WEIGHTS = re.compile(r"(adapter_)?(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


def may_replace(target: Path) -> bool:
    """Nothing there, an empty folder or earlier weights; never a folder that somebody named by mistake."""
    if target.is_dir():
        return any((target / mark).exists() for mark in MARKS) or not any(target.iterdir())
    return not target.exists()


def publish_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Put what `fill` writes into a folder at `target`, in place of earlier weights; other files there stay.

    It is written beside its place, so a kill leaves the earlier weights; what such a kill left is deleted here.
    """
    target = target.resolve() if target.is_symlink() else target
    sweep_leftovers(target)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        fill(draft)
        if target.is_dir() and _others(target, draft):
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
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _others(target: Path, draft: Path) -> set[Path]:
    """Files at `target` that are no weights of an earlier publish."""
    return {path for path in _files(target) - _files(draft) if not _WEIGHTS.fullmatch(str(path))}


def _swap(target: Path, draft: Path) -> None:
    # A folder cannot be renamed over one that holds files, so the old one steps aside first.
    aside = target.with_name(f".removing_{target.name}_{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, aside)
    os.rename(draft, target)
    shutil.rmtree(aside, ignore_errors=True)


def _replace_files(target: Path, draft: Path) -> None:
    """One file after the other, where the folder also holds what is not ours."""
    new = _files(draft)
    for path in sorted(new):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / path, target / path)
    for path in _files(target) - new:
        if _WEIGHTS.fullmatch(str(path)):
            (target / path).unlink()
