from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import fake_config, rows, rows_without_times, run_command, train_quietly
from e2e.tiny import write_tokenizer

from retrain.config import load_config
from retrain.errors import CheckpointError, ConfigError
from retrain.folder import RunFolder, meaningful_differences


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
    assert f"{logs} held an earlier run; it is now {logs}.1 (to go on with it: --resume)." in printed
    train_quietly(fake_config(model, run_folder, training__max_steps=2))
    assert [len(rows(f"{logs}{suffix}")) for suffix in ("", ".1", ".2")] == [2, 4, 1]


def test_a_renamed_run_can_still_be_resumed(model: Path, run_folder: Path) -> None:
    shutil.move(run_folder / "logs", run_folder / "elsewhere")
    elsewhere = str(run_folder / "elsewhere")
    config = fake_config(model, run_folder, training__max_steps=5, logging__log_dir=elsewhere, resume__from=elsewhere)
    train_quietly(config)
    assert [row["step"] for row in rows(elsewhere)] == [0, 1, 2, 3, 4]


HOLD = """
import sys
from retrain.config import load_config
from retrain.folder import RunFolder
folder = RunFolder(load_config(None, {"logging.log_dir": sys.argv[1]}), False, print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_live_run_is_refused(model: Path, tmp_path: Path) -> None:
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


def test_a_run_that_is_resumed_while_it_lives_is_refused(model: Path, run_folder: Path) -> None:
    resuming = fake_config(model, run_folder, resume__from=str(run_folder / "logs"))
    held = RunFolder(resuming, False, print)
    try:
        with pytest.raises(ConfigError, match="in use by another run"):
            train_quietly(resuming)
        with pytest.raises(ConfigError, match="in use by another run"):
            train_quietly(fake_config(model, run_folder))
    finally:
        held.close()


def test_a_refused_resume_lets_go_of_the_folder(model: Path, run_folder: Path) -> None:
    logs = str(run_folder / "logs")
    with pytest.raises(CheckpointError) as refused:
        train_quietly(fake_config(model, run_folder, training__lr=1.0, resume__from=logs))
    # The error, and with it every local variable on the way, is still alive here.
    assert refused.value is not None
    train_quietly(fake_config(model, run_folder, resume__from=logs))


def test_a_log_dir_that_cannot_be_made_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"\[logging\] log_dir = .* cannot be written to"):
        train_quietly(fake_config(model, tmp_path, logging__log_dir=str(tmp_path / "file" / "logs")))


def test_an_earlier_run_that_cannot_step_aside_is_an_error(
    model: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder cannot be renamed while it is the working directory by the name of ".", or a mount point.
    monkeypatch.chdir(run_folder / "logs")
    with pytest.raises(ConfigError, match="cannot be written to"):
        train_quietly(fake_config(model, run_folder, logging__log_dir="."))


def test_a_resume_that_changes_the_meaning_is_refused_with_the_list(
    model: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = run_folder / "logs"
    changed = fake_config(
        model, run_folder, training__lr=1e-3, algorithm__advantage_mode="grpo", model__lora_rank=8, training__keep=7
    )
    before = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert run_command(changed, "--resume", str(logs)) == 2
    told = capsys.readouterr().err
    assert "was trained with other settings" in told
    assert "  algorithm.advantage_mode: 'maxrl' -> 'grpo'\n" in told
    assert "  model.lora_rank: 32 -> 8\n" in told
    assert "  training.lr: 4e-05 -> 0.001\n" in told
    assert "training.keep" not in told
    assert "--force-resume" in told
    assert {path: path.read_bytes() for path in before} == before, "a refusal changes nothing"


def test_insisting_resumes_all_the_same(model: Path, run_folder: Path) -> None:
    logs = run_folder / "logs"
    changed = fake_config(model, run_folder, training__lr=1e-3, training__max_steps=5)
    assert run_command(changed, "--resume", str(logs), "--force-resume") == 0
    assert [row["step"] for row in rows(logs)] == [0, 1, 2, 3, 4]
    assert load_config(logs / "config.toml").training.lr == 1e-3


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
    from retrain.cli import run

    monkeypatch.chdir(tmp_path_factory.mktemp("anywhere"))
    assert run(["--resume", str(run_folder / "logs"), "--max-steps", "5"]) == 0
    assert [row["step"] for row in rows(run_folder / "logs")] == [0, 1, 2, 3, 4]


def test_a_resume_can_go_on_in_another_folder(model: Path, run_folder: Path) -> None:
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


def test_a_folder_with_nothing_to_resume_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing to resume"):
        train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "nowhere")))


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
    assert run_command(config, "--resume", str(run_folder / "logs")) == 2
    told = capsys.readouterr().err
    assert "has no checkpoint to resume from" in told
    assert "To go on" not in told, "the very command that was refused is no way on"


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
    assert meaningful_differences(stored, wanted) == ["training.batch_size: 8 -> 3"]


def test_the_written_configuration_is_the_whole_one(model: Path, finished: Path) -> None:
    written = load_config(finished / "logs" / "config.toml")
    assert written == fake_config(model, finished)
