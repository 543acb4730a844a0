"""Inputs of a run whose project was moved: its config.toml has absolute paths."""

from __future__ import annotations

import os
from pathlib import Path

from retrain.config import load_config
from retrain.config.options import values_of
from retrain.errors import ConfigError
from retrain.storage.checkpoint import read_state

_INPUTS = ("data.path", "eval.path", "model.model", "teaching.student_model")
_FOLDERS = "plugins.search_paths"
_ADAPTER = "backend.adapter_path"


def find_moved_inputs(config_file: Path) -> dict[str, object]:
    """Options of a stored configuration that name parts of a project that is gone, with those in the working directory.

    A resume compares the contents of data and models and the digests of code with those that were recorded.
    """
    project = read_state(config_file.parent).get("project")
    if not isinstance(project, str) or os.path.lexists(project):
        return {}
    try:
        values = values_of(load_config(config_file))
    except ConfigError:
        return {}  # reported when it is loaded to be used

    def here(path: object) -> str | None:
        """The path in the working directory of what was in the project."""
        is_inside = isinstance(path, str) and Path(project) in (Path(path), *Path(path).parents)
        return str(Path(str(path)).relative_to(project)) if is_inside else None

    found: dict[str, object] = {}
    for option in _INPUTS:
        if (path := here(values.get(option))) is not None and os.path.exists(path):
            found[option] = path
    adapter, log_dir = values.get(_ADAPTER), Path(project, str(values["logging.log_dir"]))
    # One inside of the run's folder follows it.
    if (path := here(adapter)) is not None and log_dir not in Path(str(adapter)).parents:
        found[_ADAPTER] = path
    folders = values[_FOLDERS]
    assert isinstance(folders, tuple)
    present = [here(folder) or folder for folder in folders]
    if present != list(folders):
        found[_FOLDERS] = list(dict.fromkeys(present))
    return found
