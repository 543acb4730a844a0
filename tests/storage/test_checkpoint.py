from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from retrain.errors import CheckpointError
from retrain.storage.checkpoint import Checkpoints, explain_write_error, publish_adapter, write_state_file


def write(path: Path) -> None:
    (path / "adapter").mkdir()
    (path / "adapter" / "adapter_config.json").write_text("{}")
    (path / "learner.safetensors").write_bytes(b"weights")


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, logged: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path, keep=2, log=logged.append)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_what_is_saved_is_found_again(checkpoints: Checkpoints) -> None:
    checkpoints.save(3, {"a": [1, 2.5, None]}, write)
    found = checkpoints.newest()
    assert (found.step, found.state) == (3, {"a": [1, 2.5, None]})
    assert (found.path / "learner.safetensors").read_bytes() == b"weights"


def test_floats_in_the_state_survive_to_the_bit(checkpoints: Checkpoints) -> None:
    values = [0.1, 1 / 3, 2.0**-1074, 1.7976931348623157e308]
    checkpoints.save(1, {"values": values}, write)
    assert checkpoints.newest().state["values"] == values


def test_only_the_newest_are_kept(checkpoints: Checkpoints) -> None:
    for step in (2, 4, 10, 1_000_000):
        checkpoints.save(step, {}, write)
    assert checkpoints.steps() == [10, 1_000_000]
    assert checkpoints.newest().step == 1_000_000


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_writer_that_fails_midway_leaves_the_old_one(checkpoints: Checkpoints, failure: Exception) -> None:
    checkpoints.save(2, {"step": 2}, write)

    def fail(path: Path) -> None:
        write(path)
        raise failure

    with pytest.raises(CheckpointError, match=r"No space left on device. Earlier checkpoints are intact") as caught:
        checkpoints.save(4, {}, fail)
    assert caught.value.exit_code == 1, "the run failed; its input was not wrong"
    assert names(checkpoints) == ["step_000002"], "no half-written leftover fills the disk further"
    assert checkpoints.newest().state == {"step": 2}


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "use a shorter path"),
        (SafetensorError("Io: File too large (os error 27)"), "raise the limit on the size of files (ulimit -f)"),
        (OSError(errno.EROFS, "Read-only file system"), "make it writable"),
    ],
)
def test_the_advice_after_a_write_error_fits_its_cause(failure: Exception, advice: str, tmp_path: Path) -> None:
    assert f"  Try: {advice}, then resume" in str(explain_write_error(failure, tmp_path))


def test_a_disk_that_fills_while_syncing_leaves_the_old_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(2, {}, write)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(4, {}, write)
    assert names(checkpoints) == ["step_000002"]


def test_an_interrupted_writer_leaves_the_old_one_and_is_cleaned_up_by_the_next(checkpoints: Checkpoints) -> None:
    checkpoints.save(2, {}, write)

    def interrupt(path: Path) -> None:
        write(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(4, {}, interrupt)
    assert checkpoints.newest().step == 2
    checkpoints.save(4, {}, write)
    assert names(checkpoints) == ["step_000002", "step_000004"]


def test_leftovers_of_killed_runs_are_cleaned_up(checkpoints: Checkpoints) -> None:
    for leftover in (".writing_step_000006", ".removing_step_000001_4711", ".removing_.writing_step_000006_4711"):
        (checkpoints.folder / leftover).mkdir(parents=True)
        (checkpoints.folder / leftover / "half").write_text("x")
    checkpoints.save(6, {}, write)
    assert names(checkpoints) == ["step_000006"]


DAMAGES = [
    "flipped bit",
    "missing file",
    "torn manifest",
    "no manifest",
    "other format",
    "edited state",
    "edited step",
    "a file left out",
    "no seal",
]


def edit(manifest: Path, **changes: object) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_reported(
    checkpoints: Checkpoints, logged: list[str], damage: str
) -> None:
    checkpoints.save(2, {}, write)
    newest = checkpoints.save(4, {}, write)
    manifest = newest / "checkpoint.json"
    match damage:
        case "flipped bit":
            (newest / "learner.safetensors").write_bytes(b"weightz")
        case "missing file":
            (newest / "adapter" / "adapter_config.json").unlink()
        case "torn manifest":
            manifest.write_text(manifest.read_text()[:-9])
        case "no manifest":
            manifest.unlink()
        case "other format":
            edit(manifest, format=99)
        case "edited state":
            edit(manifest, state={"progress": 5})
        case "edited step":
            edit(manifest, step=2)
        case "a file left out":
            edit(manifest, files={})
        case "no seal":
            edit(manifest, seal=None)
    assert checkpoints.newest().step == 2
    assert len(logged) == 1
    assert logged[0].startswith(f"Checkpoint {newest} is damaged (")
    assert logged[0].endswith("looking for an older one.")


def test_when_all_are_damaged_it_is_an_error(checkpoints: Checkpoints, logged: list[str]) -> None:
    for step in (2, 4):
        (checkpoints.save(step, {}, write) / "learner.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        checkpoints.newest()
    assert len(logged) == 2


def test_a_folder_without_checkpoints_has_nothing_to_resume(checkpoints: Checkpoints) -> None:
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoints.newest()


def test_later_checkpoints_can_be_dropped(checkpoints: Checkpoints) -> None:
    for step in (2, 4):
        checkpoints.save(step, {}, write)
    checkpoints.drop_after(2)
    assert checkpoints.steps() == [2]


def test_the_state_file_is_replaced_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state_file(tmp_path, {"step": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_state_file(tmp_path, {"step": 2})
    assert json.loads((tmp_path / "trainer_state.json").read_text()) == {"step": 1}


def test_the_newest_adapter_is_published_over_the_older_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    target, logged = tmp_path / "deep" / "adapter", []
    for mark in ("first", "second"):
        checkpoint = checkpoints.save(len(mark), {}, write)
        (checkpoint / "adapter" / "mark").write_text(mark)
        publish_adapter(checkpoint, target, logged.append)
        assert (target / "mark").read_text() == mark
    assert sorted(path.name for path in target.parent.iterdir()) == ["adapter"]
    assert logged == []


def test_other_files_beside_a_published_adapter_stay(checkpoints: Checkpoints, tmp_path: Path) -> None:
    target, logged = tmp_path / "adapter", []
    checkpoint = checkpoints.save(1, {}, write)
    # A model in more files than the next one: with the new weights beside them, it is unclear which are current.
    (checkpoint / "adapter" / "model-00001-of-00002.safetensors").write_text("old")
    publish_adapter(checkpoint, target, logged.append)
    (target / "thesis.txt").write_text("years of work")
    (target / "notes").mkdir()
    (target / "notes" / "a.txt").write_text("more")
    (target / "pytorch_model.bin").write_text("somebody else's")
    checkpoint = checkpoints.save(2, {}, write)
    (checkpoint / "adapter" / "mark").write_text("second")
    publish_adapter(checkpoint, target, logged.append)
    assert (target / "thesis.txt").read_text() == "years of work"
    assert (target / "notes" / "a.txt").read_text() == "more"
    assert (target / "mark").read_text() == "second"
    assert (target / "pytorch_model.bin").read_text() == "somebody else's"
    assert not (target / "model-00001-of-00002.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "adapter" in path.name) == ["adapter"]
    assert logged == []


def test_an_adapter_that_retrain_did_not_write_is_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    target, logged = tmp_path / "mine", []
    target.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (target / name).write_text("mine")
    checkpoint = checkpoints.save(1, {}, write)
    assert publish_adapter(checkpoint, target, logged.append) == checkpoint / "adapter"
    assert {path.name: path.read_text() for path in target.iterdir()} == dict.fromkeys(
        ("adapter_config.json", "adapter_model.safetensors", "README.md"), "mine"
    )
    assert "holds files that retrain did not write" in logged[0]


def test_a_mount_point_receives_the_files_across_file_systems(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, logged = tmp_path / "volume", []
    target.mkdir()
    replace = os.replace

    def within_one_system(source: Path, to: Path) -> None:
        if Path(to).parent == target and Path(source).parent != target:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, to)

    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    monkeypatch.setattr(os, "replace", within_one_system)
    for mark in ("first", "second"):
        checkpoint = checkpoints.save(len(mark), {}, write)
        (checkpoint / "adapter" / "mark").write_text(mark)
        assert publish_adapter(checkpoint, target, logged.append) == target
        assert (target / "mark").read_text() == mark
    assert logged == []


def test_others_may_read_the_published_weights(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints.save(1, {}, write)
    (checkpoint / "adapter" / "adapter_config.json").chmod(0o600)
    before = os.umask(0o022)
    try:
        publish_adapter(checkpoint, tmp_path / "adapter", lambda _: None)
    finally:
        os.umask(before)
    assert (tmp_path / "adapter" / "adapter_config.json").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_is_named_in_a_few_words(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    logged: list[str] = []
    checkpoint = checkpoints.save(1, {}, write)
    assert publish_adapter(checkpoint, tmp_path / "adapter", logged.append) == checkpoint / "adapter"
    assert logged == [
        f"Warning: the adapter could not be copied to {tmp_path / 'adapter'}: [Errno 28] No space left on device. "
        f"It is in {checkpoint / 'adapter'}."
    ]


def test_a_link_to_the_place_of_the_adapter_stays_a_link(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "adapter").symlink_to(tmp_path / "disk")
    publish_adapter(checkpoints.save(1, {}, write), tmp_path / "adapter", lambda _: None)
    assert (tmp_path / "adapter").is_symlink()
    assert (tmp_path / "disk" / "adapter_config.json").exists()


def test_what_killed_publishes_left_is_swept_and_that_of_live_ones_stays(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "60"]) as live:
        gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        dead = int(gone.stdout)
        for name in (f".adapter.{dead}", f".removing_adapter_{dead}", f".adapter.{live.pid}", f".other.{dead}"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").write_text("")
        publish_adapter(checkpoints.save(1, {}, write), tmp_path / "adapter", lambda _: None)
        live.kill()
    left = {path.name for path in tmp_path.iterdir()} & {f".adapter.{dead}", f".removing_adapter_{dead}"}
    assert not left
    assert (tmp_path / f".adapter.{live.pid}").is_dir() and (tmp_path / f".other.{dead}").is_dir()


@pytest.mark.parametrize("listed", [["{outside}"], ["../outside"], [""], ["."], ["notes"], ["a\0b"], 5, None, "x", [1]])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_record_with_odd_names_publishes_and_deletes_nothing_else(
    checkpoints: Checkpoints, tmp_path: Path, listed: Any, has_run: bool
) -> None:
    target, outside, logged = tmp_path / "adapter", tmp_path / "outside", []
    publish_adapter(checkpoints.save(1, {}, write), target, logged.append)
    outside.write_text("mine")
    (target / "notes").mkdir()
    (target / "notes" / "a.txt").write_text("mine")
    names = [str(outside)] if listed == ["{outside}"] else listed
    record = {"run": "elsewhere", "files": names} if has_run else names
    (target / ".retrain_published.json").write_text(json.dumps(record))
    assert publish_adapter(checkpoints.save(2, {}, write), target, logged.append) == target
    assert logged == []
    assert outside.read_text() == (target / "notes" / "a.txt").read_text() == "mine"


def test_a_place_that_cannot_be_published_to_is_a_warning(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoint, logged = checkpoints.save(1, {}, write), []
    publish_adapter(checkpoint, tmp_path / "file" / "adapter", logged.append)
    publish_adapter(checkpoint, tmp_path / "file", logged.append)
    assert len(logged) == 2
    assert all(line.startswith("Warning: ") and str(checkpoint / "adapter") in line for line in logged)
    assert (tmp_path / "file").is_file()


def test_other_folders_beside_the_checkpoints_are_ignored(checkpoints: Checkpoints) -> None:
    checkpoints.save(2, {}, write)
    for name in ("step_²", "step_copy", "step_"):
        (checkpoints.folder / name).mkdir()
    assert checkpoints.steps() == [2]


def test_a_checkpoint_under_another_steps_name_is_damaged(checkpoints: Checkpoints, logged: list[str]) -> None:
    checkpoints.save(2, {}, write)
    checkpoints.save(4, {}, write).rename(checkpoints.path_of(9))
    assert checkpoints.newest().step == 2
    assert "step_000009 is damaged (checkpoint.json was changed)" in logged[0]


def test_colleagues_can_read_a_checkpoint(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        save_file({"a": torch.zeros(1)}, str(folder / "learner.safetensors"))
        (folder / "learner.safetensors").chmod(0o600)  # as safetensors 0.8 leaves it

    checkpoints = Checkpoints(tmp_path, 1, print)
    before = os.umask(0o022)
    try:
        path = checkpoints.save(1, {}, write)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1, print)
    path = checkpoints.save(1, {}, lambda folder: None)
    refused = PermissionError(errno.EACCES, "Permission denied", str(path / "learner.safetensors"))
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=refused))
    with pytest.raises(CheckpointError, match=rf"safetensors cannot be read: .*chmod -R g\+rX {tmp_path}"):
        checkpoints.newest()
