"""`retrain` from the outside: which file, which environment, which exit code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.cli import train as train_command
from retrain.config import TrainConfig, load_config
from retrain.config.reference import TEMPLATES, starter
from retrain.errors import ConfigError

from .documented import ANNOTATED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Configurations that would have been run."""
    runs: list[TrainConfig] = []

    def start(config: TrainConfig, force_resume: bool = False) -> int:
        runs.append(config)
        return 0

    monkeypatch.setattr(train_command, "run_config", start)
    return runs


def test_without_a_file_it_says_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    message = capsys.readouterr().err
    assert "there is no ./retrain.toml" in message and "Try: retrain init" in message


def test_the_file_in_the_working_folder_is_taken(folder: Path, started: list[TrainConfig]) -> None:
    (folder / "retrain.toml").write_text("[training]\nlr = 0.25\n")
    assert run([]) == 0
    assert started[0].training.lr == 0.25


def test_a_named_file_and_flags_are_taken(folder: Path, started: list[TrainConfig]) -> None:
    (folder / "mine.toml").write_text("[training]\nlr = 0.25\nbatch_size = 3\n")
    assert run(["mine.toml", "--lr", "0.5", "--training.record", "--no-inference-prefix-caching"]) == 0
    config = started[-1]
    assert (config.training.lr, config.training.batch_size) == (0.5, 3)
    assert config.training.record and not config.inference.prefix_caching


def test_an_option_that_a_flag_leaves_unused_is_one_line_and_the_run_starts(
    folder: Path, started: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.toml").write_text('[reward]\ntype = "custom"\ncustom_module = "mine"\n')
    assert run(["mine.toml", "--reward-type", "match"]) == 0
    assert started[-1].reward.type == "match"
    assert capsys.readouterr().err == "note: [reward] custom_module is not used: [reward] type is match\n"
    assert run(["mine.toml"]) == 0
    assert capsys.readouterr().err == ""


def test_strict_rejects_what_is_not_used(
    folder: Path, started: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.toml").write_text("[planning]\nthreshold = 0.5\n")
    assert run(["mine.toml", "--strict"]) == 2
    assert "mine.toml has 1 problem:\n  [planning] threshold is not used: " in capsys.readouterr().err
    assert not started
    assert run(["mine.toml", "--strict", "--detector", "semantic"]) == 0


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_files_that_retrain_writes_get_no_note(template: str, folder: Path) -> None:
    (folder / "mine.toml").write_text(starter(template))
    load_config("mine.toml", strict=True)


@pytest.mark.slow
def test_a_campaign_table_can_be_added_to_the_demo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = '\n[campaign]\nseeds = [1]\nmax_steps = 1\nconditions = [{ advantage_mode = "grpo" }]\n'
    (folder / "mine.toml").write_text(starter("demo") + own)
    small = ["--eval-every", "0", "--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    assert run(["mine.toml", *small]) == 0
    shown = capsys.readouterr()
    assert [line.split(" is not used")[0] for line in shown.err.splitlines()] == [
        "note: [backend] adapter_path",
        "note: [training] seed",
        "note: [training] max_steps",
    ]
    assert "Done: 1 run" in shown.out


def test_the_full_annotated_file_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "annotated.toml").write_text(ANNOTATED)
    small = ["--max-steps", "1", "--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    here = ["--devices", "cpu", "--model", "builtin:tiny", "--data.source", "arithmetic", "--adapter-path", "adapter"]
    assert run(["annotated.toml", *small, *here]) == 0
    assert "Done: 1 step, logs in" in capsys.readouterr().out


def test_a_bound_gives_an_endless_source_epochs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.toml").write_text(starter("demo"))
    small = ["--eval-every", "0", "--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    assert run(["mine.toml", *small, "--epochs", "2", "--max-examples", "4"]) == 0
    shown = capsys.readouterr().out
    assert "Examples are generated during the run (arithmetic, 4 in all)" in shown and "Done: 4 steps" in shown
    assert run(["mine.toml", *small, "--epochs", "2"]) == 2
    assert "these examples have no end.  Try: max_examples" in capsys.readouterr().err


def test_the_environment_file_is_read_first_and_never_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".env").write_text("RETRAIN_TEST_NEW=from_file\nRETRAIN_TEST_SET=from_file\n")
    monkeypatch.setenv("RETRAIN_TEST_SET", "from_shell")
    # Set and removed, so that what the file sets is undone after the test.
    monkeypatch.setenv("RETRAIN_TEST_NEW", "")
    monkeypatch.delenv("RETRAIN_TEST_NEW")
    seen: list[str | None] = []

    def note(*arguments: object) -> TrainConfig:
        seen.append(os.environ.get("RETRAIN_TEST_NEW"))
        raise ConfigError("stop here")

    monkeypatch.setattr(train_command, "load_with_flags", note)
    (folder / "retrain.toml").touch()
    assert run([]) == 2
    assert capsys.readouterr().out == "Loaded .env\n"
    assert seen == ["from_file"]
    assert os.environ["RETRAIN_TEST_SET"] == "from_shell"


def test_an_environment_file_that_is_not_text_exits_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".env").write_bytes(b"KEY=caf\xe9\n")
    (folder / "retrain.toml").touch()
    assert run([]) == 2
    message = capsys.readouterr().err
    assert "./.env cannot be read" in message and "UTF-8" in message


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_with_nobody_to_ask_a_missing_file_exits_with_2(
    closed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI")
    monkeypatch.setattr(sys, closed, None)
    assert run([]) == 2
    assert "there is no ./retrain.toml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--resume", ""], ["--resume="], ["mine.toml", "--resume", ""]])
def test_a_resume_of_nothing_exits_with_2(
    arguments: list[str], folder: Path, started: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("retrain.toml", "mine.toml"):
        (folder / name).touch()
    assert run(arguments) == 2
    assert "--resume needs a folder" in capsys.readouterr().err
    assert started == []


def test_a_resume_expands_the_home_folder(
    folder: Path, started: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "logs").mkdir()
    (folder / "logs" / "config.toml").write_text("[training]\nlr = 0.25\n")
    assert run(["--resume=~/logs"]) == 0
    assert started[0].training.lr == 0.25


def test_the_resume_command_can_be_pasted_into_a_shell(folder: Path) -> None:
    log_dir = str(folder / "it's my; run")
    config = load_config(None, {"logging.log_dir": log_dir})
    assert train_command.resume_hint(config, 0.0) == ""
    (Path(log_dir) / "checkpoints" / "step_000002").mkdir(parents=True)
    before, _, typed = train_command.resume_hint(config, 0.0).partition(": ")
    assert before == "To resume"
    assert shlex.split(typed) == ["retrain", "--resume", log_dir]


def test_a_run_that_never_began_does_not_name_the_checkpoints_of_an_earlier_one(folder: Path) -> None:
    config = load_config(None, {"logging.log_dir": str(folder / "logs")})
    (folder / "logs" / "checkpoints" / "step_000002").mkdir(parents=True)
    assert train_command.resume_hint(config, time.time() + 60) == ""
    resumed = load_config(None, {"logging.log_dir": str(folder / "logs"), "resume.from": str(folder / "logs")})
    assert train_command.resume_hint(resumed, time.time() + 60)


def test_without_an_environment_file_nothing_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([])
    assert "Loaded" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--no-such-flag", "1"], ["a.toml", "b.toml"], ["--lr"], ["x" * 5000], [""]])
def test_a_bad_command_line_exits_with_2(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_new_process_exits_with_2_and_no_traceback(folder: Path) -> None:
    (folder / "bad.toml").write_text("[training]\nlr = -1.0\nmax_stepz = 7\n")
    done = subprocess.run(
        [sys.executable, "-m", "retrain", "bad.toml"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: bad.toml has 2 problems:",
        "  [training] lr must be > 0, got -1.0.  Try: lr = 4e-05",
        "  unknown option [training] max_stepz.  Did you mean max_steps?",
    ]
