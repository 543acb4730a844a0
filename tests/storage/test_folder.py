from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from campaign.campaigns import FakeExecutor, campaign_config, run_with
from cases import slow
from e2e.runs import fake_config, rows, rows_without_times, run_command, train_quietly, write_problems
from e2e.tiny import write_model, write_tokenizer

from retrain.analysis.change import comparable
from retrain.analysis.runs import read_run
from retrain.builtin import resolve_model
from retrain.campaign.progress import read_progress
from retrain.cli import run
from retrain.config import dump_config, load_config
from retrain.errors import CheckpointError, ConfigError
from retrain.modeling.digest import digest_models
from retrain.report.runlog import RunLog
from retrain.report.verdict import describe_verdict
from retrain.storage.aside import step_aside
from retrain.storage.checkpoint import read_state, record_failure
from retrain.storage.folder import RunFolder, lock_folder, meaningful_differences, with_absolute_paths
from retrain.storage.recording import find_recordings


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; copy it, do not touch it."""
    folder = tmp_path_factory.mktemp("finished")
    train_quietly(fake_config(model, folder))
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    written = tmp_path / "logs" / "config.toml"
    written.write_text(written.read_text().replace(str(finished), str(tmp_path)))
    return tmp_path


def test_an_earlier_run_is_renamed_and_never_overwritten(model: Path, run_folder: Path) -> None:
    before = (run_folder / "logs" / "metrics.jsonl").read_bytes()
    _, printed = train_quietly(fake_config(model, run_folder, training__max_steps=1))
    assert (run_folder / "logs.1" / "metrics.jsonl").read_bytes() == before
    assert len(rows(run_folder / "logs")) == 1
    logs = run_folder / "logs"
    assert f"{logs} held an earlier run; it is now {logs}.1 (to resume it: --resume {logs}.1)." in printed
    train_quietly(fake_config(model, run_folder, training__max_steps=2))
    assert [len(rows(f"{logs}{suffix}")) for suffix in ("", ".1", ".2")] == [2, 4, 1]


def open_folder(log_dir: Path) -> list[str]:
    """Log lines of a new run in that folder."""
    logged: list[str] = []
    places = {"logging.log_dir": str(log_dir), "backend.adapter_path": str(log_dir / "adapter"), "training.seed": 1}
    folder = RunFolder(load_config(None, places), False, logged.append)
    folder.settle()
    folder.close()
    return logged


def test_a_run_that_fails_to_start_leaves_the_earlier_one_where_it_was(run_folder: Path) -> None:
    logs = run_folder / "logs"
    RunFolder(load_config(None, {"logging.log_dir": str(logs)}), False, print).close()
    assert (logs / "metrics.jsonl").stat().st_size > 0
    assert not Path(f"{logs}.1").exists()


def test_a_run_that_is_rejected_while_it_loads_leaves_nothing(model: Path, tmp_path: Path) -> None:
    rows_file, log_dir = tmp_path / "rows.jsonl", str(tmp_path / "new" / "logs")
    config = fake_config(model, tmp_path, data__path=str(rows_file), logging__log_dir=log_dir)
    rows_file.write_text('{"question": "1+1"}\n')
    with pytest.raises(ConfigError, match="invalid row"):
        train_quietly(config)
    assert not (tmp_path / "new").exists()
    # A folder that was there before stays, with what it contains.
    Path(log_dir).mkdir(parents=True)
    (Path(log_dir) / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="invalid row"):
        train_quietly(config)
    assert [path.name for path in Path(log_dir).iterdir()] == ["notes.txt"]


def test_checkpoints_without_logs_are_an_earlier_run_too(run_folder: Path) -> None:
    logs = run_folder / "logs"
    for path in [path for path in logs.iterdir() if path.name != "checkpoints"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert open_folder(logs) == [f"{logs} held an earlier run; it is now {logs}.1 (to resume it: --resume {logs}.1)."]
    assert (run_folder / "logs.1" / "checkpoints" / "step_000004").is_dir()
    assert not (logs / "checkpoints").exists()


def test_empty_logs_are_no_earlier_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "emergence").mkdir(parents=True)
    (logs / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "eval.jsonl", "emergence/steps.jsonl"):
        (logs / name).touch()
    assert open_folder(logs) == []
    assert not (tmp_path / "logs.1").exists()


def test_a_run_in_the_folder_of_a_campaign_moves_it_and_the_campaign_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    folder = tmp_path / "logs"
    config = campaign_config(folder)
    run_with(FakeExecutor(codes={"maxrl+none_s2": 1}), config, monkeypatch)
    before = (folder / "config.toml").read_text()
    logged = open_folder(folder)
    assert logged[0] == f"{folder} held a campaign; it is now {folder}.1 (to resume it: --resume {folder}.1)."
    aside = Path(f"{folder}.1")
    assert (aside / "config.toml").read_text() == before
    executor = FakeExecutor()
    resumed = load_config(aside / "config.toml", {"resume.from": str(aside), "logging.log_dir": str(aside)})
    assert run_with(executor, resumed, monkeypatch) == 0
    assert executor.started == ["maxrl+none_s2"]


def test_a_resume_into_the_folder_of_a_campaign_is_rejected(model: Path, run_folder: Path) -> None:
    (run_folder / "campaign").mkdir()
    (run_folder / "campaign" / "manifest.json").write_text("{}")
    config = fake_config(
        model, run_folder, training__max_steps=5, resume__from=str(run_folder / "logs"),
        logging__log_dir=str(run_folder / "campaign"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="already holds a run or a campaign"):
        train_quietly(config)


def test_a_resume_into_a_taken_folder_is_rejected_before_anything_is_loaded(model: Path, run_folder: Path) -> None:
    taken = run_folder / "taken"
    taken.mkdir()
    (taken / "metrics.jsonl").write_text("{}\n")
    places = {"resume__from": str(run_folder / "logs"), "logging__log_dir": str(taken)}
    with pytest.raises(ConfigError, match="already holds a run or a campaign"):
        RunFolder(fake_config(model, run_folder, **places), False, print)
    assert [path.name for path in taken.iterdir()] == ["metrics.jsonl"]


def test_recordings_are_copied_by_a_resume_into_another_folder(model: Path, tmp_path: Path) -> None:
    train_quietly(fake_config(model, tmp_path, training__record=True, training__max_steps=2))
    config = fake_config(
        model, tmp_path, training__record=True, training__max_steps=3, resume__from=str(tmp_path / "logs"),
        logging__log_dir=str(tmp_path / "branch"),
    )  # fmt: skip
    train_quietly(config)
    assert list(find_recordings(tmp_path / "branch")) == [0, 1, 2]
    assert list(find_recordings(tmp_path / "logs")) == [0, 1]


def test_an_earlier_run_whose_new_name_would_be_too_long_is_an_error(tmp_path: Path) -> None:
    logs = tmp_path / ("y" * 255)
    logs.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be renamed \(File name too long\)\.  Try: another --log-dir"):
        step_aside(logs, print)


def test_an_earlier_run_behind_a_link_steps_aside_and_the_link_stays(run_folder: Path) -> None:
    logs, disk = run_folder / "logs", run_folder / "disk"
    disk.mkdir()
    logs.rename(disk / "run")
    logs.symlink_to(disk / "run")
    open_folder(logs)
    assert logs.is_symlink()
    assert logs.resolve() == disk / "run"
    assert not (logs / "metrics.jsonl").exists()
    assert len(rows(disk / "run.1")) == 4


def test_a_tilde_is_the_home_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    places = {"logging__log_dir": "~/logs", "backend__adapter_path": "~/adapter"}
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, **places))
    assert len(rows(home / "logs")) == 1
    assert (home / "adapter" / "steps.txt").read_text() == "1"
    assert list(here.iterdir()) == []


def test_a_finished_run_publishes_its_adapter_where_the_resume_says(model: Path, run_folder: Path) -> None:
    elsewhere = run_folder / "elsewhere"
    resuming = {"resume__from": str(run_folder / "logs"), "backend__adapter_path": str(elsewhere)}
    train_quietly(fake_config(model, run_folder, **resuming))
    assert (elsewhere / "steps.txt").read_text() == "4"


def test_a_run_killed_before_anything_but_its_checkpoint_was_written_resumes(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    (logs / "trainer_state.json").unlink()
    shutil.rmtree(run_folder / "adapter")
    train_quietly(fake_config(model, run_folder, resume__from=str(logs)))
    state = json.loads((logs / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (4, "finished")
    assert (run_folder / "adapter" / "steps.txt").read_text() == "4"


def test_a_renamed_run_can_still_be_resumed(model: Path, run_folder: Path) -> None:
    shutil.move(run_folder / "logs", run_folder / "elsewhere")
    elsewhere = str(run_folder / "elsewhere")
    config = fake_config(model, run_folder, training__max_steps=5, logging__log_dir=elsewhere, resume__from=elsewhere)
    train_quietly(config)
    assert [row["step"] for row in rows(elsewhere)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("log_dir", ["absolute", "relative"])
def test_a_renamed_run_publishes_to_the_adapter_folder_inside_the_renamed_one(
    log_dir: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs, renamed = tmp_path / "logs", tmp_path / "renamed"
    given = str(logs) if log_dir == "absolute" else "logs"
    places = {"logging__log_dir": given, "backend__adapter_path": f"{given}/adapter"}
    train_quietly(fake_config(model, tmp_path, training__max_steps=2, **places))
    logs.rename(renamed)
    for steps in (3, 4):
        assert run(["--resume", str(renamed), "--max-steps", str(steps)]) == 0
        assert (renamed / "adapter" / "steps.txt").read_text() == str(steps)
    assert load_config(renamed / "config.toml").backend.adapter_path == str(renamed / "adapter")
    assert not logs.exists()


@pytest.mark.parametrize("log_dir", ["absolute", *slow("relative")])
def test_a_run_that_stepped_aside_leaves_the_adapter_of_the_later_one_alone(
    log_dir: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = str(tmp_path / "logs") if log_dir == "absolute" else "logs"
    places = {"logging__log_dir": given, "backend__adapter_path": f"{given}/adapter"}
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, **places))
    shutil.rmtree(tmp_path / "logs" / "adapter")  # it had not yet published one
    train_quietly(fake_config(model, tmp_path, training__max_steps=2, training__seed=7, **places))
    assert run(["--resume", str(tmp_path / "logs.1"), "--max-steps", "3"]) == 0
    steps = [(tmp_path / name / "adapter" / "steps.txt").read_text() for name in ("logs", "logs.1")]
    assert steps == ["2", "3"]


def test_a_run_says_that_it_replaces_the_adapter_of_another_run(model: Path, tmp_path: Path) -> None:
    logs, other, adapter = tmp_path / "logs", tmp_path / "other", tmp_path / "adapter"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    _, again = train_quietly(fake_config(model, tmp_path, training__max_steps=2, resume__from=str(logs)))
    assert "holds the adapter of the run" not in again
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1, logging__log_dir=str(other)))
    assert f"Warning: {adapter} holds the adapter of the run in {logs}, and this run replaces it; that run's" in printed
    assert f"Try: --adapter-path {other}/adapter" in printed


def test_a_run_resumed_through_a_link_records_its_own_folder(model: Path, tmp_path: Path) -> None:
    logs, latest = tmp_path / "logs", tmp_path / "latest"
    places = {"logging__log_dir": str(logs), "backend__adapter_path": str(logs / "adapter")}
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, **places))
    latest.symlink_to(logs)
    assert run(["--resume", str(latest), "--max-steps", "2"]) == 0
    assert load_config(logs / "config.toml").logging.log_dir == str(logs)
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__seed=7, **places))
    assert run(["--resume", str(tmp_path / "logs.1"), "--max-steps", "3"]) == 0
    steps = [(tmp_path / name / "adapter" / "steps.txt").read_text() for name in ("logs", "logs.1")]
    assert steps == ["1", "3"]


@pytest.mark.slow
def test_a_copied_run_and_one_named_through_a_link_replace_their_own_adapters(model: Path, tmp_path: Path) -> None:
    logs, copied, link = tmp_path / "logs", tmp_path / "copied", tmp_path / "link"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, backend__adapter_path=str(logs / "adapter")))
    shutil.copytree(logs, copied)
    link.symlink_to(logs)
    for at, steps in ((copied, 2), (link, 2), (logs, 3)):
        places = {"logging__log_dir": str(at), "resume__from": str(at), "backend__adapter_path": f"{at}/adapter"}
        _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=steps, **places))
        assert "holds the adapter of the run" not in printed


HOLD = """
import sys
from retrain.config import load_config
from retrain.modeling.digest import digest_models
from retrain.storage.folder import RunFolder
folder = RunFolder(load_config(None, {"logging.log_dir": sys.argv[1], "training.seed": 1}), False, print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_live_run_is_rejected(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "logs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by another run \(process {holder.pid}\).*another --log-dir"):
            train_quietly(fake_config(model, tmp_path))
        holder.kill()
        holder.communicate()
    # Killed, it holds nothing any more.
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))


def test_a_folder_whose_owner_has_not_written_its_number_yet_is_in_use(tmp_path: Path) -> None:
    with lock_folder(tmp_path) as held:
        held.truncate(0)
        with pytest.raises(ConfigError, match=r"is in use by another run\.  Try: another --log-dir"):
            lock_folder(tmp_path)


def test_a_file_system_without_locks_can_hold_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_folder(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_run_that_is_resumed_while_it_lives_is_rejected(model: Path, run_folder: Path) -> None:
    resuming = fake_config(model, run_folder, resume__from=str(run_folder / "logs"))
    held = RunFolder(resuming, False, print)
    try:
        with pytest.raises(ConfigError, match="in use by another run"):
            train_quietly(resuming)
        with pytest.raises(ConfigError, match="in use by another run"):
            train_quietly(fake_config(model, run_folder))
    finally:
        held.close()


def test_a_rejected_resume_releases_the_folder(model: Path, run_folder: Path) -> None:
    logs = str(run_folder / "logs")
    with pytest.raises(CheckpointError) as raised:
        train_quietly(fake_config(model, run_folder, training__lr=1.0, resume__from=logs))
    # The error, and with it every local variable on the way, is still alive here.
    assert raised.value is not None
    train_quietly(fake_config(model, run_folder, resume__from=logs))


def test_a_log_dir_that_cannot_be_made_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"\[logging\] log_dir = .* cannot be written to"):
        train_quietly(fake_config(model, tmp_path, logging__log_dir=str(tmp_path / "file" / "logs")))


def test_an_earlier_run_that_cannot_step_aside_is_an_error(
    model: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("retrain.storage.aside.os.rename", refuse)
    before = sorted((run_folder / "logs").rglob("*"))
    with pytest.raises(ConfigError, match="cannot be renamed"):
        train_quietly(fake_config(model, run_folder))
    assert sorted((run_folder / "logs").rglob("*")) == before


def test_a_resume_that_changes_the_meaning_is_rejected_with_the_list(
    model: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = run_folder / "logs"
    changed = fake_config(
        model, run_folder, training__lr=1e-3, algorithm__advantage_mode="grpo", model__lora_rank=8, training__keep=7
    )
    before = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert run_command(changed, "--resume", str(logs)) == 2
    printed = capsys.readouterr().err
    assert "was trained with other settings" in printed
    assert '  [algorithm] advantage_mode: "maxrl" -> "grpo"\n' in printed
    assert "  [model] lora_rank: 32 -> 8\n" in printed
    assert "  [training] lr: 4e-05 -> 0.001\n" in printed
    assert "training.keep" not in printed
    assert "--force-resume" in printed
    assert {path: path.read_bytes() for path in before} == before, "a refusal changes nothing"


def test_insisting_resumes_all_the_same(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    changed = fake_config(model, run_folder, training__lr=1e-3, training__max_steps=5)
    assert run_command(changed, "--resume", str(logs), "--force-resume") == 0
    assert [row["step"] for row in rows(logs)] == [0, 1, 2, 3, 4]
    assert load_config(logs / "config.toml").training.lr == 1e-3
    # Recorded for comparisons, and kept by later resumes.
    forced = ["[training] lr: 4e-05 -> 0.001 at step 4"]
    assert read_state(logs)["forced"] == forced
    longer = fake_config(model, run_folder, training__lr=1e-3, training__max_steps=6)
    assert run_command(longer, "--resume", str(logs)) == 0
    assert read_state(logs)["forced"] == forced


def test_insisting_on_another_batch_size_uses_it(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    assert run(["--resume", str(logs), "--force-resume", "--batch-size", "3", "--max-steps", "5"]) == 0
    assert [row["batch_size"] for row in rows(logs)] == [2, 2, 2, 2, 3]
    assert len([row for row in rows(logs, "emergence/generations.jsonl") if row["step"] == 4]) == 3 * 4


@pytest.mark.slow
def test_insisting_on_an_adapter_that_does_not_fit_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "model__lora_rank": 8,
        "training__max_tokens": 8,
        "training__max_steps": 1,
        "reward__custom_function": "score_length",
    }
    whole = write_tokenizer(write_model(tmp_path / "model", layers=1))
    train_quietly(fake_config(whole, tmp_path, **real))
    logs = tmp_path / "logs"
    torn(tmp_path)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in logs.rglob("*") if path.is_file() and path.name != ".lock"}

    before = files()
    assert run(["--resume", str(logs), "--force-resume", "--lora-rank", "4", "--max-steps", "2"]) == 1
    assert "error: the saved weights do not match this model" in capsys.readouterr().err
    assert files() == before
    assert run(["--resume", str(logs), "--max-steps", "2"]) == 0
    assert [row["step"] for row in rows(logs)] == [0, 1]


def test_a_resumed_run_writes_a_configuration_that_starts_afresh(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    folder = RunFolder(fake_config(model, run_folder, resume__from=str(logs)), False, lambda line: None)
    folder.settle()
    folder.close()
    assert load_config(logs / "config.toml").resume.from_ == ""
    assert load_config(logs / "config.toml") == with_absolute_paths(fake_config(model, run_folder))


def test_a_run_with_relative_paths_resumes_from_anywhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(here)
    (here / "reward_of_here.py").write_text("def score(response, reference):\n    return 'right' in response\n")
    write_problems(here)
    relative = {
        "data__path": "problems.jsonl",
        "logging__log_dir": "logs",
        "backend__adapter_path": "adapter",
        "reward__custom_module": "reward_of_here",
    }
    train_quietly(fake_config(model, here, training__max_steps=1, **relative))
    monkeypatch.chdir(elsewhere)
    assert run(["--resume", str(here / "logs"), "--max-steps", "2"]) == 0
    assert [row["step"] for row in rows(here / "logs")] == [0, 1]
    assert (here / "adapter" / "steps.txt").read_text() == "2"
    assert list(elsewhere.iterdir()) == []


def test_how_long_where_and_how_fast_may_change(model: Path, run_folder: Path) -> None:
    free: dict[str, Any] = {
        "training__max_steps": 5,
        "training__save_every": 1,
        "training__keep": 1,
        "training__record": True,
        "backend__adapter_path": str(run_folder / "other"),
        "backend__devices": "cpu",
        "memory__micro_batch_tokens": 99,
        "reward__timeout_s": 9.0,
        "reward__workers": 2,
        "logging__wandb_group": "later",
    }
    train_quietly(fake_config(model, run_folder, resume__from=str(run_folder / "logs"), **free))
    assert len(rows(run_folder / "logs")) == 5


def test_a_resume_needs_no_configuration_but_the_folders_own(
    model: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("anywhere"))
    assert run(["--resume", str(run_folder / "logs"), "--max-steps", "5"]) == 0
    assert [row["step"] for row in rows(run_folder / "logs")] == [0, 1, 2, 3, 4]


def test_a_resume_can_continue_in_another_folder(model: Path, run_folder: Path) -> None:
    before = (run_folder / "logs" / "metrics.jsonl").read_bytes()
    config = fake_config(
        model, run_folder, training__max_steps=5, resume__from=str(run_folder / "logs"),
        logging__log_dir=str(run_folder / "branch"),
    )  # fmt: skip
    train_quietly(config)
    assert [row["step"] for row in rows(run_folder / "branch")] == [0, 1, 2, 3, 4]
    assert (run_folder / "logs" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="already holds a run"):
        train_quietly(config)


@pytest.mark.parametrize(("every", "is_replaced"), [(3, True), (2, False)])
def test_a_longer_run_says_that_the_evaluation_at_its_old_end_is_replaced(
    model: Path, tmp_path: Path, every: int, is_replaced: bool
) -> None:
    (tmp_path / "held_out").mkdir()
    problems = str(write_problems(tmp_path / "held_out"))
    held_out: dict[str, Any] = {"eval__every": every, "eval__source": "jsonl", "eval__path": problems}
    train_quietly(fake_config(model, tmp_path, **held_out))
    logs = tmp_path / "logs"
    again = fake_config(model, tmp_path, resume__from=str(logs), training__max_steps=4, **held_out)
    assert "The evaluation after" not in train_quietly(again)[1]
    line = "The evaluation after step 4, the end of the earlier run, is replaced by those of the longer run."
    assert (line in resumed(model, tmp_path, training__max_steps=5, **held_out)) is is_replaced
    expected = [0, 3, 5] if is_replaced else [0, 2, 4, 5]
    assert [row["step"] for row in rows(logs, "eval.jsonl")] == expected


def test_a_folder_with_nothing_to_resume_is_an_error(model: Path, tmp_path: Path) -> None:
    config = fake_config(model, tmp_path, resume__from=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere to resume from"):
        train_quietly(config)
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(CheckpointError, match="there is nothing to resume"):
        train_quietly(config)


def torn(run_folder: Path) -> None:
    """Leave behind what a kill leaves: later steps, then half a line, in each file."""
    for name in ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl"):
        path = run_folder / "logs" / name
        path.write_bytes(path.read_bytes() + b'{"step": 4}\n{"step": 5, "lo')


def test_a_torn_last_line_is_cut_and_no_step_appears_twice(model: Path, run_folder: Path) -> None:
    torn(run_folder)
    train_quietly(fake_config(model, run_folder, training__max_steps=6, resume__from=str(run_folder / "logs")))
    for name in ("metrics.jsonl", "emergence/steps.jsonl"):
        assert [row["step"] for row in rows(run_folder / "logs", name)] == [0, 1, 2, 3, 4, 5]
    assert len(rows(run_folder / "logs", "emergence/generations.jsonl")) == 48


def resumed(model: Path, folder: Path, **overrides: Any) -> str:
    """Two more steps of the run; their output."""
    logs = str(folder / "logs")
    config = fake_config(model, folder, **{"training__max_steps": 6, "resume__from": logs} | overrides)
    _, printed = train_quietly(config)
    return printed


def test_metrics_that_were_deleted_before_a_resume_are_missed_and_rebuilt(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    before = rows(logs)
    (logs / "metrics.jsonl").unlink()
    printed = resumed(model, run_folder)
    assert f"Warning: {logs}/metrics.jsonl lost the rows of steps 0-3 since the checkpoint." in printed
    assert "Those of steps 0-3 were rebuilt with rewards and evaluations only." in printed
    after = rows(logs)
    assert [row["step"] for row in after] == [0, 1, 2, 3, 4, 5]
    assert [row.get("rebuilt", False) for row in after] == [True] * 4 + [False] * 2
    for old, new in zip(before, after[:4], strict=True):
        kept = ("condition", "mean_reward", "correct_rate", "running_correct_rate")
        assert [new[key] for key in kept] == pytest.approx([old[key] for key in kept])


def test_metrics_that_were_shortened_keep_what_is_left_and_no_step_appears_twice(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    kept = (logs / "metrics.jsonl").read_text().splitlines(keepends=True)
    # The first two rows are gone, and a step of after the checkpoint is there.
    (logs / "metrics.jsonl").write_text("".join(kept[2:]) + '{"step": 4}\n{"ste')
    printed = resumed(model, run_folder)
    assert "lost the rows of steps 0-1 since the checkpoint. Those of steps 0-1 were rebuilt" in printed
    after = rows(logs)
    assert [row["step"] for row in after] == [0, 1, 2, 3, 4, 5]
    assert after[2] == json.loads(kept[2])


LOGS = ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl")


def test_logs_that_lost_their_first_row_but_are_longer_than_at_the_checkpoint_keep_whole_rows_only(
    model: Path, run_folder: Path
) -> None:
    logs = run_folder / "logs"
    expected = {name: rows_without_times(logs, name) for name in LOGS}
    shutil.rmtree(logs / "checkpoints" / "step_000004")
    for name in LOGS:
        (logs / name).write_bytes((logs / name).read_bytes().partition(b"\n")[2])
    printed = resumed(model, run_folder, training__max_steps=4)
    for name in LOGS[:2]:
        assert [row["step"] for row in rows(logs, name)] == [0, 1, 2, 3]
        assert rows_without_times(logs, name)[1:] == expected[name][1:]
    assert rows_without_times(logs, LOGS[2]) == expected[LOGS[2]][1:]
    assert "metrics.jsonl lost the rows of step 0 since the checkpoint. Those of step 0 were rebuilt" in printed
    assert "generations.jsonl was shortened or changed since the checkpoint." in printed


def test_logs_that_were_reformatted_before_a_resume_keep_their_rows(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    expected = {name: rows_without_times(logs, name) for name in LOGS}
    shutil.rmtree(logs / "checkpoints" / "step_000004")
    for name in LOGS:
        held = rows(logs, name)
        (logs / name).write_text("".join(json.dumps(row, separators=(",  ", ":   ")) + "\n" for row in held))
    printed = resumed(model, run_folder, training__max_steps=4)
    assert {name: rows_without_times(logs, name) for name in LOGS} == expected
    assert "metrics.jsonl was changed since the checkpoint; it still has the rows of all earlier steps." in printed


def test_what_the_other_logs_do_not_have_is_reported_as_gone(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    for name in ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl"):
        (logs / name).unlink()
    printed = resumed(model, run_folder)
    assert "metrics.jsonl lost the rows of steps 0-3 since the checkpoint. The other logs do not have them." in printed
    assert "steps.jsonl lost the rows of steps 0-3 since the checkpoint. There are no completions to rebuild" in printed
    assert "generations.jsonl was shortened or changed since the checkpoint. Lost rows cannot be rebuilt." in printed
    assert [row["step"] for row in rows(logs)] == [4, 5]


def test_summaries_are_rebuilt_from_completions_and_metrics_from_them(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    before, summaries = rows(logs), rows(logs, "emergence/steps.jsonl")
    (logs / "metrics.jsonl").unlink()
    (logs / "emergence" / "steps.jsonl").unlink()
    assert "steps.jsonl lost the rows of steps 0-3" in resumed(model, run_folder)
    rebuilt = rows(logs, "emergence/steps.jsonl")[:4]
    assert rebuilt == [row | {"rebuilt": True} for row in summaries]
    assert [row["correct_rate"] for row in rows(logs)[:4]] == [row["correct_rate"] for row in before]


def test_a_resume_on_edited_data_is_a_warning(model: Path, run_folder: Path) -> None:
    assert "the data has changed" not in resumed(model, run_folder)
    problems = run_folder / "problems.jsonl"
    problems.write_text("".join(reversed(problems.read_text().splitlines(keepends=True))))
    printed = resumed(model, run_folder, training__max_steps=8)
    assert "Warning: the data has changed since the checkpoint: the number of examples is the same" in printed
    # What the run was trained with is recorded, for comparisons with other runs.
    data = read_state(run_folder / "logs")["data"]
    assert data.count("+") == 1
    assert "the data has changed" not in resumed(model, run_folder, training__max_steps=10)
    assert read_state(run_folder / "logs")["data"] == data


def test_a_resume_with_more_data_is_rejected_before_the_model_is_loaded(model: Path, run_folder: Path) -> None:
    with (run_folder / "problems.jsonl").open("a") as file:
        file.write('{"prompt": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(CheckpointError, match="the data now has"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("e2e.fakes.build", lambda *_: pytest.fail("the backend was built"))
        resumed(model, run_folder, training__max_steps=8)


def test_data_that_was_moved_is_not_another_setting(model: Path, run_folder: Path) -> None:
    moved = str((run_folder / "problems.jsonl").rename(run_folder / "moved.jsonl"))
    printed = resumed(model, run_folder, training__max_steps=8, data__path=moved)
    assert "Resuming from" in printed and "changed" not in printed
    (run_folder / "other.jsonl").write_text("".join(reversed(Path(moved).read_text().splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match=r"\[data\] path: .* -> "):
        resumed(model, run_folder, training__max_steps=10, data__path=str(run_folder / "other.jsonl"))


def test_a_resume_on_edited_held_out_problems_is_a_warning(model: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    own = {"eval__every": 2, "eval__source": "jsonl", "eval__path": str(held_out)}
    train_quietly(fake_config(model, tmp_path, **own))
    assert "held-out problems have changed" not in resumed(model, tmp_path, training__max_steps=6, **own)
    held_out.write_text('{"prompt": "1 + 2?", "answer": "3"}\n')
    assert "the held-out problems have changed since" in resumed(model, tmp_path, training__max_steps=8, **own)


def test_a_resume_with_an_edited_reward_is_a_warning(model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "edited_score.py"
    reward.write_text("def score(response, reference):\n    return float(len(response) % 2)\n")
    own = {"reward__custom_module": "edited_score", "plugins__search_paths": [str(tmp_path)]}
    train_quietly(fake_config(model, tmp_path, **own))
    assert "has changed since the checkpoint" not in resumed(model, tmp_path, **own)
    reward.write_text("def score(response, reference):\n    return float(len(response) % 3)\n")
    printed = resumed(model, tmp_path, training__max_steps=8, **own)
    assert "Warning: the code of edited_score has changed since the checkpoint." in printed
    # What the run was trained with is recorded, for comparisons with other runs.
    code = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())["code"]["edited_score"]
    assert code.count("+") == 1
    assert read_state(tmp_path / "logs")["edited_at"] == 6
    assert "has changed since the checkpoint" not in resumed(model, tmp_path, training__max_steps=10, **own)
    assert json.loads((tmp_path / "logs" / "trainer_state.json").read_text())["code"]["edited_score"] == code
    assert read_state(tmp_path / "logs")["edited_at"] == 6


def test_a_finished_run_keeps_its_evaluation_until_there_is_a_new_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, other = tmp_path / "held_out.jsonl", tmp_path / "other.jsonl"
    held_out.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    other.write_text('{"prompt": "1 + 2?", "answer": "3"}\n')
    own = {"eval__every": 2, "eval__source": "jsonl"}
    train_quietly(fake_config(model, tmp_path, **own, eval__path=str(held_out)))
    logs = tmp_path / "logs"
    kept = {name: (logs / name).read_bytes() for name in ("eval.jsonl", "config.toml", "trainer_state.json")}
    for error in (KeyError("column"), KeyboardInterrupt()):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr("retrain.evaluate.Evaluator.run", Mock(side_effect=error))
            resumed(model, tmp_path, **own, eval__path=str(other), training__max_steps=4)
        assert {name: (logs / name).read_bytes() for name in kept} == kept
    before = rows(logs, "eval.jsonl")
    resumed(model, tmp_path, **own, eval__path=str(other), training__max_steps=4)
    after = rows(logs, "eval.jsonl")
    assert after[:-1] == before[:-1] and after[-1]["step"] == before[-1]["step"]
    assert after[-1]["problems"] != before[-1]["problems"]
    assert load_config(logs / "config.toml").eval.path == str(other)


def test_evaluations_by_an_edited_reward_are_not_compared_with_those_before(model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "held_out_score.py"
    reward.write_text("def score(response, reference):\n    return 0.0\n")
    own = {"reward__custom_module": "held_out_score", "plugins__search_paths": [str(tmp_path)]}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    own |= {"eval__every": 2, "eval__source": "jsonl", "eval__path": str(held_out)}
    train_quietly(fake_config(model, tmp_path, **own))
    before = rows(tmp_path / "logs", "eval.jsonl")
    assert comparable(before) == before and len(before) > 1
    # Of another length: within a second, Python takes a file of the same length for the one that it has compiled.
    reward.write_text("def score(response, reference):\n    return 1.0  # edited\n")
    resumed(model, tmp_path, training__max_steps=8, **own)
    after = rows(tmp_path / "logs", "eval.jsonl")
    assert len(comparable(after)) == len(after) - len([row for row in after if row["eval_pass_at_1"] == 0.0]) > 0


@pytest.mark.parametrize("changed", ["model.safetensors", *slow("generation_config.json", "chat_template.jinja")])
def test_a_model_whose_files_have_changed_since_the_checkpoint_is_refused(tmp_path: Path, changed: str) -> None:
    own = Path(shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "own"))
    train_quietly(fake_config(own, tmp_path))
    for unread in ("README.md", "training_args.bin", "consolidated.safetensors", "tokenizer_config.json.bak"):
        (own / unread).write_text("No part of the model.")
    assert "Resuming from" in resumed(own, tmp_path)
    content = (own / changed).read_bytes()
    (own / changed).write_bytes(
        content[:-1] + bytes([content[-1] ^ 1]) if changed == "model.safetensors" else content + b" "
    )
    with pytest.raises(CheckpointError, match=rf"the model .*own has changed since: {changed}\n"):
        resumed(own, tmp_path, training__max_steps=8)
    forced = fake_config(own, tmp_path, resume__from=str(tmp_path / "logs"), training__max_steps=8)
    assert "Resuming from" in train_quietly(forced, force_resume=True)[1]
    digests = read_state(tmp_path / "logs")["models"][str(own)]
    assert [file for file, digest in digests.items() if "+" in digest] == [changed]
    assert "Resuming from" in resumed(own, tmp_path, training__max_steps=10)
    assert read_state(tmp_path / "logs")["models"][str(own)] == digests


def test_weights_of_a_large_model_are_compared_by_pieces_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.modeling.digest._WHOLE", 1000)
    monkeypatch.setattr("retrain.modeling.digest._PIECE", 1000)
    own = Path(shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "own"))
    config = fake_config(own, tmp_path)
    before, weights = digest_models(config), own / "model.safetensors"
    assert list(before) == [str(own)] and digest_models(config) == before
    # As training does: every number a little.
    weights.write_bytes(bytes(byte ^ 1 for byte in weights.read_bytes()))
    assert digest_models(config) != before


def test_a_configuration_that_was_edited_since_the_checkpoint_is_refused(run_folder: Path) -> None:
    written = run_folder / "logs" / "config.toml"
    written.write_text(written.read_text().replace("lr = 4e-05", "lr = 0.5"))
    edited = load_config(written, {"resume.from": str(run_folder / "logs"), "training.max_steps": 6})
    with pytest.raises(CheckpointError, match=r"\[training\] lr: 4e-05 -> 0\.5"):
        train_quietly(edited)
    # With the settings of the checkpoint, nothing is mixed.
    restored = {"resume.from": str(run_folder / "logs"), "training.max_steps": 5, "training.lr": 4e-5}
    assert "--force-resume" not in train_quietly(load_config(written, restored))[1]
    assert read_state(run_folder / "logs")["forced"] == []
    written.write_text(written.read_text().replace("lr = 4e-05", "lr = 0.5"))
    _, printed = train_quietly(edited, force_resume=True)
    assert "Warning: --force-resume: [training] lr: 4e-05 -> 0.5 at step 5." in printed


def test_a_finished_run_that_is_extended_is_not_finished(
    model: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = run_folder / "logs"
    assert read_state(logs)["status"] == "finished"
    record_failure(logs, "cured")
    seen = []
    # A process that is killed before its next checkpoint leaves this.
    monkeypatch.setattr("retrain.trainer.run_or_save", lambda *_: seen.append(read_state(logs)))
    resumed(model, run_folder, training__max_steps=8)
    assert seen[0]["status"] == "running" and "error" not in seen[0]
    assert read_progress(logs).status == "dead"


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(model: Path, run_folder: Path) -> None:
    expected = rows_without_times(run_folder / "logs")
    (run_folder / "logs" / "checkpoints" / "step_000004" / "adapter" / "steps.txt").write_text("9")
    _, printed = train_quietly(fake_config(model, run_folder, resume__from=str(run_folder / "logs")))
    assert "is damaged (adapter/steps.txt does not match its digest); looking for an older one." in printed
    assert "at step 2." in printed
    assert rows_without_times(run_folder / "logs") == expected


def test_when_every_checkpoint_is_damaged_the_run_says_so(
    model: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (run_folder / "logs" / "checkpoints").iterdir():
        (checkpoint / "checkpoint.json").write_text("{")
    config = fake_config(model, run_folder)
    assert run_command(config, "--resume", str(run_folder / "logs"), "--max-steps", "6") == 2
    printed = capsys.readouterr().err
    assert "has no checkpoint to resume from" in printed
    assert "To resume" not in printed, "the command that failed is not suggested"


def test_a_kill_while_the_configuration_is_written_leaves_the_old_one(
    model: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = run_folder / "logs"
    config, before = fake_config(model, run_folder, resume__from=str(logs)), (logs / "config.toml").read_text()

    def torn_write(self: Path, text: str, **options: Any) -> int:
        with self.open("w") as file:
            file.write(text[:20])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", torn_write)
        with pytest.raises(KeyboardInterrupt):
            train_quietly(config)
    assert (logs / "config.toml").read_text() == before


def test_differences_that_only_say_where_are_no_differences() -> None:
    stored = load_config(None, {"logging.log_dir": "a", "training.max_steps": 5})
    wanted = load_config(None, {"logging.log_dir": "b", "training.max_steps": 6, "training.batch_size": 3})
    assert meaningful_differences(stored, wanted) == ["[training] batch_size: 8 -> 3"]


def test_the_written_configuration_is_the_complete_one(model: Path, finished: Path) -> None:
    written = load_config(finished / "logs" / "config.toml")
    assert written == with_absolute_paths(fake_config(model, finished))


def test_a_lost_configuration_is_restored_from_the_checkpoint(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run_folder / "logs" / "config.toml"
    written.unlink()
    assert run(["--resume", str(run_folder / "logs")]) == 0
    assert "is restored from the newest checkpoint" in capsys.readouterr().out
    assert load_config(written).training.max_steps == 4
    (run_folder / "own.toml").write_text(written.read_text())
    written.unlink()
    given = [str(run_folder / "own.toml"), "--log-dir", str(run_folder / "logs")]
    assert run([*given, "--resume", str(run_folder / "logs")]) == 0
    assert "is restored from the newest checkpoint" in capsys.readouterr().out
    written.unlink()
    shutil.rmtree(run_folder / "logs" / "checkpoints")
    assert run(["--resume", str(run_folder / "logs")]) == 2
    assert "has no config.toml, and no checkpoint with a copy of it." in capsys.readouterr().err
    (run_folder / "logs" / "checkpoints" / "step_000001").mkdir(parents=True)
    assert run(["--resume", str(run_folder / "logs" / "checkpoints" / "step_000001")]) == 2
    assert f"Try: --resume {run_folder / 'logs'}, which resumes from its newest" in capsys.readouterr().err


def test_an_adapter_path_with_other_files_is_a_warning_before_the_first_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "thesis.txt").write_text("mine")
    _, printed = train_quietly(fake_config(model, tmp_path))
    before = printed.partition("Step 0")[0]
    assert f"{tmp_path / 'adapter'} holds files that retrain did not write" in before
    assert (tmp_path / "adapter" / "thesis.txt").read_text() == "mine"


def test_a_finished_run_is_shown_as_it_was_trained_if_its_config_toml_was_edited(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        folders = {"logging__log_dir": str(tmp_path / name), "backend__adapter_path": str(tmp_path / f"{name}_adapter")}
        train_quietly(fake_config(model, tmp_path, training__lr=0.001, **folders))
    capsys.readouterr()
    folder, written = tmp_path / "b", tmp_path / "b" / "config.toml"
    assert not read_run(folder).edits and not RunLog(folder).edits
    assert "lr = 0.001\n" in written.read_text()
    written.write_text(written.read_text().replace("lr = 0.001\n", "lr = 0.9\n"))
    for shown in (read_run(folder), RunLog(folder)):
        assert shown.config.training.lr == 0.001 and shown.edits == ("[training] lr: 0.001 -> 0.9",)
    note = f"{written} is not what the run was trained with, which is shown here ([training] lr: 0.001 -> 0.9)."
    assert run(["diff", str(tmp_path / "a"), str(folder)]) == 0
    assert note in capsys.readouterr().out
    assert note in describe_verdict([read_run(folder)], [RunLog(folder)])["notes"]
    # A longer run is wanted, and another evaluation was made.
    written.write_text(
        written.read_text().replace("max_steps = 4\n", "max_steps = 40\n").replace("samples = 1\n", "samples = 3\n")
    )
    shown = read_run(folder)
    assert shown.edits == ("[training] lr: 0.001 -> 0.9", "[training] max_steps: 4 -> 40")
    assert (shown.config.training.max_steps, shown.config.eval.samples) == (4, 3)


def test_a_file_as_adapter_path_is_a_warning_before_the_first_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").write_text("mine")
    _, printed = train_quietly(fake_config(model, tmp_path))
    assert f"{tmp_path / 'adapter'} is a file, not a folder, so adapters" in printed.partition("Step 0")[0]
    assert (tmp_path / "adapter").read_text() == "mine"


def test_an_adapter_that_cannot_be_replaced_is_not_said_to_be_replaced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of another user.
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, logging__log_dir=str(tmp_path / "other")))
    monkeypatch.setattr("retrain.storage.folder.is_writable_folder", lambda path: path != tmp_path / "adapter")
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    before = printed.partition("Step 0")[0]
    assert "cannot be written to, so adapters stay" in before and "this run replaces it" not in before


def test_an_adapter_path_that_cannot_be_written_to_is_a_warning_before_the_first_step(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    _, printed = train_quietly(fake_config(model, tmp_path, backend__adapter_path=str(tmp_path / "file" / "adapter")))
    before = printed.partition("Step 0")[0]
    assert f"{tmp_path / 'file'} cannot be written to, so adapters stay in the checkpoints.  Try: " in before


def test_another_model_in_an_edited_configuration_is_refused(run_folder: Path) -> None:
    written = run_folder / "logs" / "config.toml"
    edited = load_config(written, {"training.max_steps": 6})
    other = edited.model_copy(update={"model": edited.model.model_copy(update={"model": "some/model"})})
    written.write_text(dump_config(other))
    with pytest.raises(CheckpointError, match=r'\[model\] model: .* -> "some/model"'):
        RunFolder(load_config(written, {"resume.from": str(run_folder / "logs")}), False, print)


def test_an_adapter_in_a_folder_of_the_same_name_elsewhere_stays_there(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "published" / "logs" / "adapter"
    train_quietly(fake_config(model, tmp_path, backend__adapter_path=str(adapter)))
    written = tmp_path / "logs" / "config.toml"
    written.write_text(written.read_text().replace(f'log_dir = "{tmp_path}/logs"', 'log_dir = "logs"'))
    resumed(model, tmp_path, backend__adapter_path=str(adapter))
    assert (adapter / "steps.txt").read_text() == "6"
    assert not (tmp_path / "logs" / "adapter").exists()


def test_planning_phrases_are_part_of_the_method_and_stay_in_a_resume(model: Path, run_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r'\[logging\] strategic_grams: "" -> "boxed"'):
        resumed(model, run_folder, logging__strategic_grams="boxed")


def test_a_drawn_seed_is_printed_and_a_named_one_is_not(tmp_path: Path) -> None:
    logged: list[str] = []
    places = {"logging.log_dir": str(tmp_path / "logs")}
    folders = [RunFolder(load_config(None, places), False, logged.append)]
    folders[0].close()
    folders.append(RunFolder(load_config(None, places | {"training.seed": 3}), False, logged.append))
    folders[1].close()
    drawn = folders[0].config.training.seed
    assert logged == [f"Seed: {drawn}, drawn for this run. To repeat it: --seed {drawn}"]
