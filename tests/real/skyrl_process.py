"""SkyRL's Tinker server on the CPU, seen through the proxy that translates for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from .servers import free_port
from .tinker_proxy import Proxy

SKYRL = [["install", "torch==2.13.0"], ["install", "skyrl[tinker,jax]==0.3.0"]]


@contextlib.contextmanager
def skyrl(python: Path, model: str, folder: Path) -> Iterator[str]:
    """The address of a running server, seen through the proxy."""
    port = free_port()
    settings = json.dumps({"max_lora_adapters": 8, "max_lora_rank": 8, "train_micro_batch_size": 8})
    with (folder / "skyrl.log").open("wb") as log:
        process = subprocess.Popen(
            [
                python, Path(__file__).with_name("skyrl_server.py"), "api",
                "--port", str(port),
                "--base-model", model,
                "--backend", "jax",
                "--backend-config", settings,
                "--checkpoints-base", folder / "states",
                "--database-url", f"sqlite:///{folder}/skyrl.db",
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    proxy = Proxy(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 600
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "skyrl.log").read_text()
            time.sleep(1)
        yield proxy.url
    finally:
        proxy.close()
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").is_success
    except httpx.HTTPError:
        return False
