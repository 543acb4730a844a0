"""Permissions of weights."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from retrain.runtime.permissions import share_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private file of weights beside a configuration, in a subfolder and behind a link."""
    folder = tmp_path / "adapter"
    (folder / "base").mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "config.json").chmod(0o640)
    for path in (folder / "model.safetensors", folder / "base" / "model.safetensors", tmp_path / "secret"):
        path.touch(mode=0o600)
    (folder / "link.safetensors").symlink_to("../secret")
    (folder / "gone.safetensors").symlink_to("nowhere")
    return folder


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_weights_in_the_folder_itself_are_shared(folder: Path) -> None:
    share_weights(folder)
    assert mode_of(folder / "model.safetensors") == 0o640
    assert mode_of(folder / "base" / "model.safetensors") == mode_of(folder.parent / "secret") == 0o600


def test_weights_of_somebody_else_stay_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError))
    share_weights(folder)
    assert mode_of(folder / "model.safetensors") == 0o600
