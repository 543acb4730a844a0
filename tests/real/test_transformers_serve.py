"""`transformers serve` 5.22.2 answers with text alone: it is rejected, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.runs import train_quietly

from retrain.errors import ConfigError

from .conftest import Prepare
from .models import widen_heads
from .servers import Served, free_port, run_on

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

INSTALLS = [
    ["install", "torch==2.13.0"],
    ["install", "torch==2.13.0", "transformers[serving]==5.22.2", "accelerate"],
]


def test_a_server_without_token_ids_is_rejected(side_venv: Prepare, tmp_path: Path) -> None:
    python, port = side_venv("transformers-serve", INSTALLS), free_port()
    model = widen_heads(tmp_path / "model")
    place = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command = [python.parent / "transformers", "serve", model, *place]
    with Served(command, tmp_path / "serve.log", port, {}) as server:
        with pytest.raises(ConfigError, match=r"does not complete token ids.*return_token_ids"):
            train_quietly(run_on("openai", server.url, model, tmp_path))
        with pytest.raises(ConfigError, match="is not a vllm server"):
            train_quietly(run_on("vllm", server.url, model, tmp_path))
