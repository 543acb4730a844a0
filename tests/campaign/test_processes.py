"""Campaigns of real processes, over the fake backend."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from retrain.campaign.processes import has_checkpoint, mark_attempt, prepare_folder, read_error
from retrain.campaign.progress import is_locked
from retrain.config.load import dump_config

from .campaigns import GRPO, MAXRL, TESTS, campaign_config, manifest_of, planned, statuses, write_result

SLOW = """
import time
from e2e.fakes import build as build_fake

def build(config, tokenizer, log, progress):
    backend = build_fake(config, tokenizer, log, progress)
    train = backend.train_step
    backend.train_step = lambda datums, step: time.sleep(0.3) or train(datums, step)
    return backend
"""
PAIR = ("grpo+none_s1", "maxrl+none_s1")


def start(folder: Path, *arguments: str, python: Sequence[str] = ()) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    return subprocess.Popen(
        [sys.executable, *python, "-m", "retrain", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps_of(folder: Path, name: str) -> list[int]:
    path = folder / "c" / "runs" / name / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def write_slow_campaign(folder: Path, steps: int) -> None:
    (folder / "slow.py").write_text(SLOW)
    config = campaign_config(
        folder / "c", {"backend": {"backend": "slow.build"}}, seeds=[1], max_steps=steps, parallel=True
    )
    (folder / "campaign.toml").write_text(dump_config(config))


@pytest.mark.slow
def test_a_run_that_cannot_start_leaves_the_other_alone(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("import not_there\n\ndef score(response, reference):\n    return 0.0\n")
    broken = MAXRL | {"reward": {"type": "custom", "custom_module": "breaks"}}
    config = campaign_config(tmp_path / "c", seeds=[1], conditions=[GRPO, broken], parallel=True)
    (tmp_path / "campaign.toml").write_text(dump_config(config))
    process = start(tmp_path, "campaign.toml")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    name = "maxrl+none_custom_module=breaks_reward.type=custom_s1"
    assert statuses(tmp_path / "c") == {"grpo+none_s1": "finished", name: "failed"}
    record = manifest_of(tmp_path / "c")["runs"][1]
    assert "not_there" in record["error"]
    assert "not_there" in output
    run = tmp_path / "c" / "runs" / "grpo+none_s1"
    assert "Step 3 [grpo+none]" in (run / "stdout.log").read_text()
    assert (run / "adapter" / "adapter_config.json").exists()
    assert "not_there" in (tmp_path / "c" / "runs" / name / "stderr.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("share_model", [False, True])
def test_a_file_named_like_a_module_of_python_is_in_the_way_of_no_run(share_model: bool, tmp_path: Path) -> None:
    for name in ("random", "statistics", "queue"):
        (tmp_path / f"{name}.py").write_text("def mean(values): return sum(values) / len(values)\n")
    tables = {"backend": {"backend": "local", "devices": "cpu"}, "model": {"lora_rank": 4}}
    how: dict[str, Any] = {"seeds": [1], "conditions": [GRPO], "max_steps": 1, "share_model": share_model}
    config = campaign_config(tmp_path / "c", tables, **how)
    (tmp_path / "campaign.toml").write_text(dump_config(config))
    output, _ = start(tmp_path, "campaign.toml", python=["-P"]).communicate(timeout=200)
    assert statuses(tmp_path / "c") == {"grpo+none_s1": "finished"}, output


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_a_resume_needs_no_file(tmp_path: Path) -> None:
    write_slow_campaign(tmp_path, 400)
    process = start(tmp_path, "campaign.toml")
    wait_for(lambda: all(len(steps_of(tmp_path, name)) > 2 for name in PAIR))
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - pressed < 30
    assert process.returncode == 130, output
    assert set(statuses(tmp_path / "c").values()) == {"interrupted"}
    done = {name: len(steps_of(tmp_path, name)) for name in PAIR}
    assert all((tmp_path / f"c/runs/{name}/checkpoints/step_{done[name]:06d}").is_dir() for name in PAIR)
    most = max(done.values()) + 2
    again = start(tmp_path, "--resume", "c", "--campaign-max-steps", str(most))
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert all(steps_of(tmp_path, name) == list(range(most)) for name in PAIR)
    assert all("Resuming from" in (tmp_path / f"c/runs/{name}/stdout.log").read_text() for name in PAIR)


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_is_trained_again_on_resume(tmp_path: Path) -> None:
    config = campaign_config(tmp_path / "c", seeds=[1], parallel=True)
    (tmp_path / "campaign.toml").write_text(dump_config(config))
    output, _ = start(tmp_path, "campaign.toml").communicate(timeout=200)
    assert set(statuses(tmp_path / "c").values()) == {"finished"}, output
    expected = steps_of(tmp_path, PAIR[1])
    shutil.rmtree(tmp_path / "c" / "runs" / PAIR[1])
    again = start(tmp_path, "--resume", "c")
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert steps_of(tmp_path, PAIR[1]) == expected


@pytest.mark.slow
def test_a_forced_resume_reaches_the_runs(tmp_path: Path) -> None:
    (tmp_path / "campaign.toml").write_text(dump_config(campaign_config(tmp_path / "c", seeds=[1], parallel=True)))
    output, _ = start(tmp_path, "campaign.toml").communicate(timeout=200)
    done = steps_of(tmp_path, PAIR[0])
    longer = ["--resume", "c", "--lr", "1e-3", "--campaign-max-steps", str(len(done) + 1)]
    refused = start(tmp_path, *longer)
    output, _ = refused.communicate(timeout=200)
    assert refused.returncode == 2 and "[training] lr" in output
    forced = start(tmp_path, *longer, "--force-resume")
    output, _ = forced.communicate(timeout=200)
    assert forced.returncode == 0, output
    assert steps_of(tmp_path, PAIR[0]) == [*done, len(done)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.slow
def test_runs_save_and_end_when_the_campaign_is_killed(tmp_path: Path) -> None:
    write_slow_campaign(tmp_path, 400)
    process = start(tmp_path, "campaign.toml")
    wait_for(lambda: all(steps_of(tmp_path, name) for name in PAIR))
    folders = [tmp_path / "c" / "runs" / name for name in PAIR]
    assert all(is_locked(folder) for folder in folders)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(is_locked(folder) for folder in folders), 20)
    assert all(has_checkpoint(folder) for folder in folders)


def test_what_a_run_left_before_its_first_checkpoint_is_cleared(tmp_path: Path) -> None:
    run = planned(campaign_config(tmp_path))[0]
    write_result(run, 0.5, 2, "running")
    (run.folder / "stderr.log").write_text("why it died")
    prepare_folder(run)
    assert not (run.folder / "metrics.jsonl").exists()
    assert not (run.folder / "trainer_state.json").exists()
    assert (run.folder / "stderr.log").read_text() == "why it died"


def test_the_last_lines_of_a_dead_run_hide_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    path = tmp_path / "stderr.log"
    path.write_text(
        "x" * 5000 + "opensesame99" + "y" * 1995 + "\nasked https://me:hunter2222@host.example/?api_key=abcdef"
    )
    shown = read_error(path)
    assert shown.endswith("\nasked https://***@host.example/?api_key=***") and "same99" not in shown


def test_the_error_of_an_earlier_attempt_is_not_that_of_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    mark_attempt(path)
    assert not path.exists()
    path.write_text("CUDA is not available")
    assert read_error(path) == "CUDA is not available"
    mark_attempt(path)
    assert read_error(path) == ""
    with path.open("a") as file:
        file.write("a warning\n")
    assert read_error(path) == "a warning"
    assert path.read_text().startswith("CUDA")
