"""Resuming a finished run, and evaluating it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from retrain.cli import run

SMALL = """
[model]
model = "builtin:tiny"
[backend]
devices = "cpu"
adapter_path = "adapter"
[data]
source = "arithmetic"
[training]
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 8
[reward]
workers = 1
[logging]
log_dir = "logs/train"
"""


def evaluations() -> int:
    return len(Path("logs/train/eval.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_finished_run_is_evaluated_only_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("retrain.toml").write_text(SMALL)
    assert run(["--eval-every", "5", "--eval-max-examples", "2"]) == 0
    assert evaluations() == 2
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "retrain.trainer", None)
        capsys.readouterr()
        assert run(["--resume", "logs/train"]) == 0
    shown = capsys.readouterr().out
    assert "logs/train is finished: 1 step, held-out " in shown
    assert "To train longer: retrain --resume logs/train --max-steps 2\n" in shown
    assert evaluations() == 2
    # Other held-out problems are evaluated, with the trained adapter and no further step.
    assert run(["--resume", "logs/train", "--eval-max-examples", "3"]) == 0
    assert "Done: 1 step, held-out " in capsys.readouterr().out
    first, last = (json.loads(line) for line in Path("logs/train/eval.jsonl").read_text().splitlines())
    assert (len(first["counted"]), len(last["counted"])) == (2, 3)
    assert run(["--resume", "logs/train", "--max-steps", "2"]) == 0
    done = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Done: 2 steps, held-out "))
    assert done.endswith(", logs in logs/train, adapter in adapter."), "paths as in the first run"


@pytest.mark.parametrize("arguments", [["eval"], ["evaluate", "logs/train"], ["eval", "--resume", "logs/train"]])
def test_a_command_that_evaluates_is_explained(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert f"there is no file or command '{arguments[0]}'.  To evaluate a trained run: " in capsys.readouterr().err


def test_an_unknown_command_with_arguments_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fly", "away"]) == 2
    assert "there is no file or command 'fly'.  Try: retrain --help" in capsys.readouterr().err


@pytest.mark.parametrize("rest", [[], ["--max-steps", "1"]])
def test_a_link_to_itself_is_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rest: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert run(["loop", *rest]) == 2
    assert "error: loop cannot be read: Too many levels of symbolic links." in capsys.readouterr().err
