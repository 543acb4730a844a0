"""`retrain init-plugin`: what it writes works as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.cli.init_plugin import SCAFFOLDS
from retrain.config import build_config
from retrain.plugins import REGISTRIES


def _toml_of(output: str) -> str:
    """The lines for a configuration, as printed."""
    return output.partition("In your configuration:\n\n")[2].partition("\n\nIts test:")[0].partition("\n\nTo ship")[0]


def test_there_is_one_for_every_kind_that_is_promised() -> None:
    promised = [
        "advantage",
        "transform",
        "algorithm",
        "loss",
        "reward",
        "data",
        "environment",
        "planning",
        "engine",
        "backend",
    ]
    assert list(SCAFFOLDS) == promised
    assert set(promised) <= set(REGISTRIES)


@pytest.mark.slow
def test_every_scaffold_passes_its_own_test(tmp_path: Path) -> None:
    for kind in SCAFFOLDS:
        assert (
            run(["init-plugin", "--kind", kind, "--name", f"my_{kind}", "--with-test", "--output", str(tmp_path)]) == 0
        )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    # Other plugins of pytest would take these tests for those of a worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = sum(scaffold.test.count("def test_") for scaffold in SCAFFOLDS.values())
    assert f"{tests} passed" in done.stdout


@pytest.mark.parametrize("kind", SCAFFOLDS)
def test_the_printed_lines_load_and_find_the_plugin(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"printed_{kind}"
    assert run(["init-plugin", "--kind", kind, "--name", name, "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    config = build_config(tomllib.loads(_toml_of(output)), {}, source="printed")
    assert list(config.plugins.search_paths) == [str(tmp_path)]
    path = f"{name}.{SCAFFOLDS[kind].attribute}"
    assert path in _toml_of(output)
    assert f'[project.entry-points."retrain.{kind}"]' in output
    assert callable(REGISTRIES[kind].load(path, config.plugins.search_paths))
    assert not (tmp_path / f"test_{name}.py").exists()


def test_in_the_working_directory_no_search_path_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init-plugin", "--kind", "reward", "--name", "my_reward_here"]) == 0
    assert "search_paths" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["1st", "my-plugin", "a.b", "class", "", "../up", "größe"])
def test_a_name_that_python_cannot_import_is_rejected(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init-plugin", "--kind", "reward", "--name", name, "--output", str(tmp_path)]) == 2
    assert "my_plugin" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "sys", "numpy"])
def test_a_name_that_is_taken_is_rejected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init-plugin", "--kind", "reward", "--name", name, "--output", str(tmp_path)]) == 2
    assert f"my_{name}" in capsys.readouterr().err


def test_existing_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("# mine\n", encoding="utf-8")
    assert run(["init-plugin", "--kind", "data", "--name", "mine", "--with-test", "--output", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


def test_an_unknown_kind_is_rejected_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init-plugin", "--kind", "rewards", "--name", "x"]) == 2
    assert "reward" in capsys.readouterr().err
