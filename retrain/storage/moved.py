"""Inputs of a run whose project was moved: its config.toml has absolute paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from retrain.config import load_config
from retrain.config.options import values_of
from retrain.errors import ConfigError

_FILES = ("data.path", "eval.path")
_FOLDERS = "plugins.search_paths"
_MODELS = ("model.model", "teaching.student_model")
_ADAPTER = "backend.adapter_path"


def find_moved_inputs(config_file: Path) -> dict[str, object]:
    """Options of a stored configuration that name what is gone, with what is in its place in the working directory.

    A resume compares the contents of data and models and the digests of code with those that were recorded.
    """
    try:
        values = values_of(load_config(config_file))
    except ConfigError:
        return {}  # reported when it is loaded to be used
    files = {option: Path(str(values[option])) for option in (*_FILES, *_MODELS) if _is_gone(values.get(option))}
    folders = values[_FOLDERS]
    assert isinstance(folders, tuple)
    adapter = [Path(str(values[_ADAPTER]))] if _is_gone(values.get(_ADAPTER)) else []
    # A folder that is missing inside of one that is still there was not moved.
    kept = {Path(folder) for folder in folders if os.path.isdir(folder)}
    gone = {folder: Path(folder) for folder in folders if _is_gone(folder) and kept.isdisjoint(Path(folder).parents)}
    place = _find_place([*files.values(), *adapter], list(gone.values()))
    found: dict[str, object] = {
        option: str(_without(path, place)) for option, path in files.items() if _is_inside(path, place)
    }
    # One inside of the run's folder follows by itself.
    if adapter and _is_inside(adapter[0], place):
        here = _without(adapter[0], place)
        found |= {_ADAPTER: str(here)} if config_file.parent.resolve() not in here.resolve().parents else {}
    moved = [name for name, path in gone.items() if len(path.parts) == place or _is_inside(path, place)]
    present = [str(_without(gone[folder], place)) if folder in moved else folder for folder in folders]
    if present != list(folders):
        found[_FOLDERS] = list(dict.fromkeys(present))
    return found


def _is_gone(path: object) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and not os.path.lexists(path)


def _find_place(files: Sequence[Path], folders: Sequence[Path]) -> int:
    """The number of parts of the old folder: that with which most of these paths are in the working directory."""

    def fitting(depth: int) -> float:
        found = sum(_is_inside(path, depth) for path in (*files, *folders))
        # Any folder could have been the project itself.
        return found + 0.5 * any(len(folder.parts) == depth for folder in folders)

    depths = range(1, max((len(path.parts) for path in (*files, *folders)), default=0) + 1)
    return max(depths, key=fitting, default=0)


def _is_inside(path: Path, depth: int) -> bool:
    """Whether a path of a folder of so many parts is in the working directory."""
    return len(path.parts) > depth and _without(path, depth).exists()


def _without(path: Path, depth: int) -> Path:
    """The path without its first parts; the working directory, if there is none left."""
    return Path(*path.parts[depth:])
