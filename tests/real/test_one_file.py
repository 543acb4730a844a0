"""One TOML file, three places to train: PyTorch here, vLLM, a Tinker service. One line is changed, and each learns."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from backends.tinker_server import KEY, TinkerServer
from e2e.runs import rows

from .conftest import Prepare
from .servers import serve_vllm
from .skyrl_process import SKYRL, skyrl

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

FILE = """
[backend]
backend = "local"
devices = "cpu"
adapter_path = "adapter"

[inference]
engine = "pytorch"

[model]
model = "{model}"
lora_rank = 8

[algorithm]
advantage_mode = "grpo"
transform_mode = "none"

[data]
source = "arithmetic"

[training]
seed = 1
max_steps = 24
batch_size = 8
group_size = 8
max_tokens = 64
temperature = 0.8
lr = 0.002

[eval]
every = 24
max_examples = 128

[logging]
log_dir = "logs"
"""
PORT = 8000
"""Where engine = "vllm" looks for its server when no url is given."""


def learn(folder: Path, model: Path, line: str = "", **environment: str) -> tuple[float, float]:
    """Run the file with one line in place of the one for its key; held-out pass rates before and after."""
    key = line.partition(" = ")[0]
    changed = [line if line and own.startswith(f"{key} = ") else own for own in FILE.format(model=model).splitlines()]
    (folder / "run.toml").write_text("\n".join(changed))
    own = os.environ | {"PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0", "HOME": str(folder)} | environment
    done = subprocess.run(
        [sys.executable, "-m", "retrain", "run.toml"], cwd=folder, env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = rows(folder / "logs")
    assert [row["step"] for row in metrics] == list(range(24))
    assert max(row["ratio_max"] for row in metrics) < 1.02
    scored = rows(folder / "logs", "eval.jsonl")
    before, after = scored[0]["eval_pass_at_1"], scored[-1]["eval_pass_at_1"]
    rates = [row["correct_rate"] for row in metrics]
    largest = max(row["ratio_max"] for row in metrics)
    print(f"\n{line or 'as it is'}: {before:.3f} -> {after:.3f}, {sum(rates[:5]) / 5:.2f} -> {sum(rates[-5:]) / 5:.2f}")
    print(f"largest ratio {largest:.7f}, {sum(row['step_time_s'] for row in metrics):.0f} s of steps")
    return before, after


def assert_learnt(before: float, after: float) -> None:
    """Far outside of what 128 problems vary by: a standard error is 4 points."""
    assert after > before + 0.2


def test_pytorch_learns(tmp_path: Path, tiny: Path) -> None:
    assert_learnt(*learn(tmp_path, tiny))


def test_vllm_learns(tmp_path: Path, tiny: Path, vllm_python: Path) -> None:
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", PORT)), f"port {PORT} is taken, and the file names no other"
    with serve_vllm(vllm_python, tiny, tmp_path, port=PORT):
        assert_learnt(*learn(tmp_path, tiny, 'engine = "vllm"'))


@contextlib.contextmanager
def loopback(model: Path, folder: Path) -> Iterator[str]:
    with TinkerServer(folder / "exports", str(model), batching=True) as server:
        yield server.url


@pytest.mark.parametrize("service", ["loopback", "skyrl"])
def test_tinker_learns(tmp_path: Path, tiny: Path, side_venv: Prepare, service: str) -> None:
    at = loopback(tiny, tmp_path) if service == "loopback" else skyrl(side_venv("skyrl", SKYRL), str(tiny), tmp_path)
    with at as url:
        environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY if service == "loopback" else "tml-dummy"}
        assert_learnt(*learn(tmp_path, tiny, 'backend = "tinker"', **environment))
