"""Inputs of a run whose project was moved: its config.toml has absolute paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from retrain.config import load_config
from retrain.config.options import values_of
from retrain.errors import ConfigError

_FILES = ("data.path", "eval.path")
_FOLDERS = "plugins.search_paths"


def find_moved_inputs(config_file: Path) -> dict[str, object]:
    """Options of a stored configuration that name what is gone, with what is in its place in the working directory.

    A resume compares the contents of data and the digests of code with those that were recorded.
    """
    try:
        values = values_of(load_config(config_file))
    except ConfigError:
        return {}  # reported when it is loaded to be used
    found: dict[str, object] = {}
    for option in _FILES:
        path = Path(str(values.get(option) or ""))
        here = next((file for file in _ends_of(path) if file.is_file()), None)
        if path.is_absolute() and here is not None and not os.path.lexists(path):
            found[option] = str(here)
    folders = values.get(_FOLDERS)
    assert isinstance(folders, tuple)
    present = [folder if os.path.isdir(os.path.expanduser(folder)) else "." for folder in folders]
    if "." in present and tuple(present) != folders:
        found[_FOLDERS] = list(dict.fromkeys(present))
    return found


def _ends_of(path: Path) -> Iterator[Path]:
    """The path without its first folders, longest first."""
    for count in range(1, len(path.parts)):
        yield Path(*path.parts[count:])
