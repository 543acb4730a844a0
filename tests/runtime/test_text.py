"""Paths as they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.runtime.text import shorten_path


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/logs/train", "logs/train"),
        ("logs/train", "logs/train"),
        ("../logs", "../logs"),
        ("/home/you/logs", "/home/you/logs"),
        ("/home/meadow", "/home/meadow"),
        ("/home/me", "/home/me"),
    ],
)
def test_a_path_is_shown_from_the_working_directory_if_it_is_inside(
    monkeypatch: pytest.MonkeyPatch, path: str, shown: str
) -> None:
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/me"))
    assert shorten_path(Path(path)) == shown
