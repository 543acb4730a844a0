"""Campaigns on a real Ray cluster of two raylets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Prepare

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PLUGIN = """
import time
from e2e.fakes import build as build_fake

def build(config, tokenizer, log, progress):
    backend = build_fake(config, tokenizer, log, progress)
    train = backend.train_step
    backend.train_step = lambda datums, step: time.sleep({pause}) or train(datums, step)
    return backend
"""
CAMPAIGN = """
[backend]
backend = "slow.build"
[model]
model = "builtin:tiny"
[training]
batch_size = 2
group_size = 4
max_tokens = 32
save_every = 2
[data]
source = "arithmetic"
[reward]
type = "custom"
custom_module = "e2e.scores"
workers = 1
[plugins]
search_paths = [".", {tests!r}]
[logging]
log_dir = "campaign"
[campaign]
seeds = [1]
max_steps = {steps}
parallel = true
executor = "ray"
gpus_per_run = {gpus}
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "none"
"""


class Cluster:
    def __init__(self, python: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, Path(__file__).with_name("ray_cluster.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.address = self.output.readline().strip()

    def lose_a_machine(self) -> None:
        self.input.write("\n")
        self.input.flush()
        assert self.output.readline() == "gone\n"

    def close(self) -> None:
        self.input.close()
        self.process.wait(timeout=60)
        self.output.close()


@pytest.fixture
def python(side_venv: Prepare) -> Path:
    return side_venv("ray", [["install", "ray[default]"]])


@pytest.fixture
def environment() -> dict[str, str]:
    # The packages that the tests run with come first; from the other environment only Ray is taken.
    paths = (ROOT, ROOT / "tests", sysconfig.get_path("purelib"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster(python: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    made = Cluster(python, environment)
    environment["RAY_ADDRESS"] = made.address
    try:
        yield made
    finally:
        made.close()


def start(python: Path, folder: Path, environment: dict[str, str], **values: Any) -> subprocess.Popen[str]:
    settings = {"steps": 4, "gpus": 0.0, "pause": 0.1} | values
    (folder / "slow.py").write_text(PLUGIN.format(**settings))
    (folder / "campaign.toml").write_text(CAMPAIGN.format(tests=str(ROOT / "tests"), **settings))
    return subprocess.Popen(
        [python, "-m", "retrain", "campaign.toml"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps_of(folder: Path, name: str) -> list[int]:
    path = folder / "campaign" / "runs" / name / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while min(len(steps_of(folder, name)) for name in ("grpo+none_s1", "maxrl+none_s1")) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.timeout(600)
def test_results_come_back_from_the_cluster(
    tmp_path: Path, python: Path, environment: dict[str, str], cluster: Cluster
) -> None:
    process = start(python, tmp_path, environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    manifest = json.loads((tmp_path / "campaign" / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    for record in manifest["runs"]:
        folder = tmp_path / "campaign" / record["folder"]
        assert (record["status"], record["step"], record["exit_code"]) == ("finished", 4, 0)
        assert steps_of(tmp_path, record["name"]) == [0, 1, 2, 3]
        assert (folder / "checkpoints" / "step_000004" / "checkpoint.json").exists()
        assert (folder / "adapter" / "adapter_config.json").exists()
        assert str(tmp_path) in (folder / "config.toml").read_text()


@pytest.mark.timeout(600)
def test_a_run_whose_machine_is_lost_continues_elsewhere(
    tmp_path: Path, python: Path, environment: dict[str, str], cluster: Cluster
) -> None:
    process = start(python, tmp_path, environment, steps=16, pause=1.5)
    wait_until(tmp_path, 5, process)
    cluster.lose_a_machine()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "lost its machine; resuming on another" in output
    logs = ""
    for name in ("grpo+none_s1", "maxrl+none_s1"):
        assert steps_of(tmp_path, name) == list(range(16))
        logs += (tmp_path / "campaign" / "runs" / name / "stdout.log").read_text()
    assert "Resuming from" in logs


@pytest.mark.timeout(600)
def test_ctrl_c_stops_the_cluster_runs_and_leaves_checkpoints(
    tmp_path: Path, python: Path, environment: dict[str, str], cluster: Cluster
) -> None:
    process = start(python, tmp_path, environment, steps=400, pause=0.5)
    wait_until(tmp_path, 2, process)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert time.monotonic() - started < 12
    manifest = json.loads((tmp_path / "campaign" / "manifest.json").read_text())
    assert [record["status"] for record in manifest["runs"]] == ["interrupted", "interrupted"]
    for record in manifest["runs"]:
        checkpoints = sorted((tmp_path / "campaign" / record["folder"] / "checkpoints").glob("step_*"))
        assert checkpoints


@pytest.mark.timeout(600)
def test_more_gpus_than_the_cluster_has_are_rejected(
    tmp_path: Path, python: Path, environment: dict[str, str], cluster: Cluster
) -> None:
    process = start(python, tmp_path, environment, gpus=1.0)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "the Ray cluster has 0 GPUs in total" in output
