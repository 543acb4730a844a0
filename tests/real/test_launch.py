"""A run that starts real vLLM itself, on the CPU: it trains, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.runs import rows, train_quietly

from retrain.config import TrainConfig
from retrain.config.load import dump_config
from retrain.errors import RolloutError

from .servers import run_on

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def vllm_on_the_path(vllm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{vllm_python.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def config_of(model: Path, folder: Path, **overrides: object) -> TrainConfig:
    own = {"inference__launch": True, "inference__wait_s": 900.0, "inference__max_model_len": 256}
    return run_on("vllm", "", model, folder, **own | overrides)


def processes_of(model: Path) -> list[str]:
    """Command lines of servers of a model, and of what they started: vLLM's workers carry its name as theirs."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid,ppid,pgid,args"], capture_output=True, text=True, check=True).stdout
    heads = [line.split()[2] for line in listed.splitlines() if f"serve {model}" in line and "keeper.py" not in line]
    return [line for line in listed.splitlines() if line.split()[2] in heads]


def assert_gone(model: Path) -> None:
    deadline = time.monotonic() + 60
    while processes_of(model):
        assert time.monotonic() < deadline, processes_of(model)
        time.sleep(0.5)


def test_a_run_starts_vllm_trains_and_ends_it(tiny: Path, tmp_path: Path) -> None:
    result, printed = train_quietly(config_of(tiny, tmp_path, training__max_steps=3))
    assert "Starting a vLLM server on cpu" in printed
    assert "recomputed" not in printed, "it is started with processed log-probs"
    metrics = rows(result.log_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics:
        assert row["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert [row["policy_proof"] for row in metrics[1:]] == pytest.approx([1.0] * 2, abs=0.05)
    assert "Application startup complete" in (tmp_path / "logs" / "vllm.log").read_text()
    assert_gone(tiny)


def test_a_killed_trainer_takes_vllm_along(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, training__max_steps=500)
    (tmp_path / "run.toml").write_text(dump_config(config))
    trainer = subprocess.Popen(
        [sys.executable, "-m", "retrain", str(tmp_path / "run.toml")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = Path(config.logging.log_dir) / "metrics.jsonl"
    while not (log.exists() and log.stat().st_size):
        assert trainer.poll() is None
        time.sleep(0.5)
    assert len(processes_of(tiny)) > 1, "the server and its workers"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert_gone(tiny)


def test_a_context_that_vllm_refuses_is_told_in_its_own_words(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"has ended with exit code 1\. The last lines of .*vllm\.log"):
        train_quietly(config_of(tiny, tmp_path, inference__max_model_len=100_000))
    assert_gone(tiny)
