"""Log folders that hold other files than those of a run."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from campaign.campaigns import FakeExecutor, campaign_config, run_with
from e2e.runs import fake_config, rows, train_quietly
from e2e.tiny import write_tokenizer

from retrain.cli import doctor, run
from retrain.errors import ConfigError
from retrain.grpo.checks import locked
from retrain.storage.aside import step_aside
from retrain.storage.logs import RANK_LOGS, REPORT, SERVER_LOG, TRACKIO_NAME, WANDB_ID
from retrain.storage.publishing import RECORD

THEIRS = {
    "config.toml": "[server]\nport = 8000\n",
    "eval.jsonl": '{"prompt": "1+1=?", "answer": "2"}\n',
    "metrics.jsonl": '{"step": 1, "loss": 0.5}\n',
    "checkpoints/step_100/model.pt": "weights",
    "manifest.json": '{"name": "an app"}\n',
    "trainer_state.json": '{"global_step": 8, "log_history": []}\n',
    "rollouts/first.txt": "a text",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", THEIRS)
def test_a_run_is_refused_where_it_would_replace_what_retrain_did_not_write(
    name: str, model: Path, tmp_path: Path
) -> None:
    # `retrain grpo` locks its output folder, too.
    theirs = {name: THEIRS[name], "notes.txt": "mine", ".lock": ""}
    write(tmp_path / "logs", theirs)
    shown = name.partition("/")[0]
    with pytest.raises(ConfigError, match=rf"holds {shown}, not of a run.*Try: another --log-dir"):
        train_quietly(fake_config(model, tmp_path))
    # Nothing is changed, and no lock is left.
    assert contents(tmp_path / "logs") == theirs
    _, printed = train_quietly(fake_config(model, tmp_path, logging__log_dir=str(tmp_path / "logs" / "run")))
    assert len(rows(tmp_path / "logs" / "run")) == 4 and "Not moved" not in printed


def test_a_campaign_is_refused_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs"
    write(folder, {"config.toml": THEIRS["config.toml"]})
    with pytest.raises(ConfigError, match=r"holds config\.toml, not of a run"):
        run_with(FakeExecutor(), campaign_config(folder), monkeypatch)
    assert contents(folder) == {"config.toml": THEIRS["config.toml"]}


def test_a_resume_into_such_a_folder_is_refused(model: Path, tmp_path: Path) -> None:
    train_quietly(fake_config(model, tmp_path, training__max_steps=2))
    write(tmp_path / "new", {"config.toml": THEIRS["config.toml"]})
    resumed = {"resume__from": str(tmp_path / "logs"), "logging__log_dir": str(tmp_path / "new")}
    with pytest.raises(ConfigError, match=r"holds config\.toml, not of a run"):
        train_quietly(fake_config(model, tmp_path, **resumed))
    assert contents(tmp_path / "new") == {"config.toml": THEIRS["config.toml"]}


@pytest.mark.parametrize("command", ["doctor", "explain"])
def test_doctor_and_explain_say_so_before_the_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "start_trials", lambda config: nullcontext(list))
    monkeypatch.setattr(doctor, "probe_torch", lambda: {"cuda": None, "available": False, "gpus": []})
    write(tmp_path, {"logs/eval.jsonl": THEIRS["eval.jsonl"]})
    text = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
    Path("retrain.toml").write_text(text + '[data]\nsource = "arithmetic"\n')
    assert run([command, "retrain.toml", "--log-dir", "logs/other"]) == 0
    capsys.readouterr()
    assert run([command, "retrain.toml", "--log-dir", "logs", "--json"]) == 1
    assert "logs holds eval.jsonl, not of a run" in capsys.readouterr().out
    assert contents(tmp_path / "logs") == {"eval.jsonl": THEIRS["eval.jsonl"]}


def test_other_files_stay_when_a_run_steps_aside(model: Path, tmp_path: Path) -> None:
    # The data and the configuration in the log folder are those of the next run, too.
    logs = tmp_path / "logs"
    write(logs, {"notes.txt": "mine", "figures/a.txt": "a figure"})
    (logs / "problems.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?", "answer": "3"}\n')
    options = {"data__path": str(logs / "problems.jsonl"), "backend__adapter_path": str(logs / "adapter")}
    for start in range(3):
        config = fake_config(model, tmp_path, training__max_steps=start + 1, **options)
        _, printed = train_quietly(config)
        stays = "Not moved, since it is not part of it: figures, notes.txt, problems.jsonl."
        assert (stays in printed) == (start > 0)
    assert [len(rows(f"{logs}{suffix}")) for suffix in ("", ".1", ".2")] == [3, 1, 2]
    for aside in (f"{logs}.1", f"{logs}.2"):
        assert not {"notes.txt", "figures", "problems.jsonl", ".lock"} & set(os.listdir(aside))
        assert {"adapter", "checkpoints", "config.toml", "metrics.jsonl"} <= set(os.listdir(aside))
    assert contents(logs)["notes.txt"] == "mine" and contents(logs)["figures/a.txt"] == "a figure"


def test_all_that_retrain_writes_moves_with_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logs, ids = tmp_path / "logs", []
    everything = {
        "logging__wandb_project": "tests",
        "logging__debug": True,
        "training__record": True,
        "eval__every": 1,
        "eval__source": "arithmetic",
        "eval__max_examples": 2,
        "backend__adapter_path": str(logs / "my_adapter"),
    }
    for seed in (1, 2):
        _, printed = train_quietly(
            fake_config(model, tmp_path, training__max_steps=1, training__seed=seed, **everything)
        )
        assert ("Not moved, since it is not part of it: notes.txt." in printed) == (seed == 2)
        ids.append((logs / WANDB_ID).read_text())
        assert not (logs / REPORT).exists() and (logs / SERVER_LOG).exists() == (seed == 2)
        assert run(["report", str(logs)]) == 0 and run(["card", str(logs), "--no-plots"]) == 0
        write(logs, {TRACKIO_NAME: "a", f"{RANK_LOGS}/rank_0.log": "a", SERVER_LOG: "a", "notes.txt": "mine"})
    # A run under the id of another would be written over it.
    assert ids[0] != ids[1] and (tmp_path / "logs.1" / WANDB_ID).read_text() == ids[0]
    stays = {".lock", SERVER_LOG, "notes.txt"}
    assert set(os.listdir(tmp_path / "logs.1")) == set(os.listdir(logs)) - stays


def test_a_run_in_the_working_directory_can_be_repeated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for steps in (2, 1):
        train_quietly(fake_config(model, tmp_path, logging__log_dir=".", training__max_steps=steps))
    assert Path.cwd() == work and len(rows(".")) == 1 and len(rows(f"{work}.1")) == 2
    assert run(["--resume", f"{work}.1", "--max-steps", "3"]) == 0
    assert len(rows(f"{work}.1")) == 3


def test_a_run_that_left_the_working_directory_takes_its_own_adapter_along(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for seed in (1, 2):
        options = {"training__seed": seed, "training__max_steps": 2, "backend__adapter_path": "adapter"}
        train_quietly(fake_config(model, tmp_path, logging__log_dir=".", **options))
    later = contents(work / "adapter")
    assert run(["--resume", f"{work}.1", "--max-steps", "4"]) == 0
    assert contents(work / "adapter") == later
    assert json.loads((tmp_path / "work.1" / "adapter" / RECORD).read_text())["run"] == f"{work}.1"


def test_the_adapter_of_another_run_stays(model: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    other = {"logging__log_dir": str(tmp_path / "other"), "backend__adapter_path": str(logs / "other_adapter")}
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, **other))
    before = contents(logs / "other_adapter")
    for _ in range(2):
        _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    assert "Not moved, since it is not part of it: other_adapter." in printed
    assert contents(logs / "other_adapter") == before


def test_a_campaign_names_what_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    write(logs, {"rows.jsonl": "mine"})
    assert run_with(FakeExecutor(), campaign_config(logs), monkeypatch) == 0
    held = f"{logs} held an earlier run; it is now {logs}.1 (to resume it: --resume {logs}.1)."
    assert f"{held} Not moved, since it is not part of it: rows.jsonl." in capsys.readouterr().out


def test_a_campaign_leaves_a_link_where_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, link = tmp_path / "disk", tmp_path / "logs"
    disk.mkdir()
    link.symlink_to(disk)
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    assert run_with(FakeExecutor(), campaign_config(link), monkeypatch) == 0
    assert link.readlink() == disk and (disk / "manifest.json").is_file() and rows(f"{disk}.1")


def test_a_private_folder_in_a_log_folder_stays(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    (tmp_path / "logs" / "theirs").mkdir(mode=0o700)
    is_file = Path.is_file

    def look(path: Path) -> bool:
        # Root may look into any folder.
        if path.parent == tmp_path / "logs" / "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", look)
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    assert "Not moved, since it is not part of it: theirs." in printed
    assert (tmp_path / "logs" / "theirs").is_dir() and len(rows(f"{tmp_path}/logs.1")) == 1


def test_retrain_grpo_does_not_write_into_the_folder_of_a_run(model: Path, tmp_path: Path) -> None:
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    before = contents(tmp_path / "logs")
    message = r"holds a run of a TOML file.  Try: another folder"
    with pytest.raises(ConfigError, match=message), locked(str(tmp_path / "logs")):
        pass
    assert contents(tmp_path / "logs") == before


@pytest.mark.parametrize("is_mount", [True, False])
def test_an_earlier_run_that_cannot_be_renamed_is_refused_before_anything_is_loaded(
    is_mount: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    before = contents(logs)
    if is_mount:
        monkeypatch.setattr("retrain.storage.aside.os.path.ismount", lambda path: Path(path) == logs)
    else:  # in a folder of somebody else
        monkeypatch.setattr("retrain.storage.aside.os.access", lambda path, mode: Path(path) != tmp_path)
    why = "it is a mount point" if is_mount else f"{tmp_path} cannot be written to"
    with pytest.raises(ConfigError, match=rf"cannot be renamed: {why}.*Try: another --log-dir, such as"):
        train_quietly(fake_config(model, tmp_path))
    assert contents(logs) == before


def test_a_run_that_can_be_moved_only_in_part_stays_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    write(logs, {"notes.txt": "mine"})
    before, rename, moved = contents(logs), os.rename, []

    def third_fails(source: Path, target: Path) -> None:
        moved.append(source)
        if len(moved) == 3:
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr("retrain.storage.aside.os.rename", third_fails)
    with pytest.raises(ConfigError, match=r"cannot be renamed \(Permission denied\)"):
        step_aside(logs, print)
    assert contents(logs) == before and not Path(f"{logs}.1").exists()


def test_a_copied_or_damaged_run_is_an_earlier_run(model: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    for name in (".lock", "trainer_state.json"):
        (logs / name).unlink()
    row = json.loads((logs / "metrics.jsonl").read_text())
    (logs / "config.toml").write_text("[training\n")  # edited badly
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    assert "held an earlier run" in printed and rows(f"{logs}.1") == [row]
