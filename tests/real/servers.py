"""Starting and ending real servers on the loopback interface."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from retrain.config import TrainConfig, load_config

START_S = 900.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A server process with all that it starts; what it prints goes into a file."""

    def __init__(self, command: Sequence[object], log: Path, port: int, environment: Mapping[str, str]) -> None:
        self.command = [str(part) for part in command]
        self.log, self.port, self.environment = log, port, environment
        self.url = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **offline, **self.environment, "PYTHONPATH": ""},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code < 500:
                    return
            except httpx.TransportError:
                time.sleep(1)
        raise AssertionError(f"no server after {START_S:.0f} s: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End it and its children at once, as a machine that is switched off would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.kill()


def serve_vllm(python: Path, model: Path, folder: Path, *flags: str, lora: bool = True, port: int = 0) -> Served:
    """vLLM on the CPU, with adapters of rank 8."""
    port = port or free_port()
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    common = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "64", "--seed", "0"]
    command = [python.parent / "vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port), *common, *flags]
    command += ["--enable-lora", "--max-lora-rank", "8"] if lora else []
    # Threads that spin while they wait cost more than they give on a small machine.
    pinned = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if lora else {}
    return Served(command, folder / "vllm.log", port, quiet | pinned | adapters)


def run_on(engine: str, url: str, model: Path, folder: Path, **overrides: Any) -> TrainConfig:
    """A short run on the embedded task; overrides are `section__key`."""
    small: dict[str, Any] = {
        "backend.devices": "cpu",
        "backend.adapter_path": str(folder / "adapter"),
        "model.model": str(model),
        "model.lora_rank": 8,
        "algorithm.advantage_mode": "grpo",
        "algorithm.transform_mode": "none",
        "training.seed": 1,
        "training.max_steps": 5,
        "training.batch_size": 2,
        "training.group_size": 4,
        "training.max_tokens": 32,
        "training.temperature": 0.7,
        "training.lr": 1e-3,
        "data.source": "arithmetic",
        "inference.engine": engine,
        "inference.url": url,
        "inference.wait_s": 5.0,
        "logging.log_dir": str(folder / "logs"),
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})
