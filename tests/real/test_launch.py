"""A run that starts real vLLM itself, on the CPU: it trains, and leaves no process behind."""

from __future__ import annotations

import contextlib
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

MARK = "RETRAIN_STARTED_BY"
ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def vllm_on_the_path(vllm_python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PATH", f"{vllm_python.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def config_of(model: Path, folder: Path, **overrides: object) -> TrainConfig:
    own = {"inference__launch": True, "inference__wait_s": 900.0, "inference__max_model_len": 256}
    return run_on("vllm", "", model, folder, **own | overrides)


def processes_of(folder: Path) -> list[str]:
    """Names of all that a test started, by what it put into their environment; children have it too."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # Some end, or belong to the system.
        with contextlib.suppress(OSError):
            if f"{MARK}={folder}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "comm").read_text().strip())
    return found


def assert_gone(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while processes_of(folder):
        assert time.monotonic() < deadline, processes_of(folder)
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
    assert_gone(tmp_path)


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
    names = processes_of(tmp_path)
    assert any("EngineCor" in name for name in names) and any("Worker" in name for name in names), names
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert_gone(tmp_path)


def test_a_context_that_vllm_rejects_is_reported_in_its_own_words(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"exited with code 1\. The last lines of .*vllm\.log"):
        train_quietly(config_of(tiny, tmp_path, inference__max_model_len=100_000))
    assert_gone(tmp_path)
