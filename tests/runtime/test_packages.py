"""Commands that install what is missing."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from retrain.runtime import packages


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that retrain seems to be installed from."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()

    class Installed(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            return json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}})

        def locate_file(self, path: object) -> Path:
            return folder

    monkeypatch.setattr(packages, "distribution", lambda name: Installed())
    return folder


def test_an_extra_is_installed_from_the_clone_wherever_one_is(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone.parent)
    assert packages.install_command("matplotlib") == f'pip install -e "{clone}[plots]"'
    monkeypatch.chdir(clone)
    assert packages.install_command("matplotlib") == 'pip install -e ".[plots]"'


def test_a_clone_that_was_deleted_is_not_named(clone: Path) -> None:
    (clone / "pyproject.toml").unlink()
    assert packages.install_command("matplotlib") == 'pip install -e ".[plots]"'


def test_an_error_names_what_needs_the_package() -> None:
    text = str(packages.missing("ray", '[campaign] executor = "ray"'))
    assert text.startswith('[campaign] executor = "ray" needs the package ray, which is not installed.  Try: pip ')
    assert "[ray]" in text
