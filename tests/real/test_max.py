"""Sampling through `max serve` 26.7.0 on the CPU. Its adapters need a GPU, so training through it is rejected here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.runs import train_quietly

from retrain.errors import ConfigError
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.proof import PolicyScorer, Row
from retrain.inference_engine.http.startup import Startup
from retrain.inference_engine.max import MAX
from retrain.modeling.policy import load_policy
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Sampling

from .conftest import Prepare
from .models import write_llama
from .servers import Served, free_port, run_on

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

UV = [["install", "uv"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def server(side_venv: Prepare, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # pip finds no set of versions that fits; uv does.
    uv = side_venv("uv", UV)
    python = side_venv("max-serve", [["--version"]], [uv, "-m", "uv", "pip", "install", "max[serve]==26.7.0"])
    port = free_port()
    shape = ["--max-length", "256", "--max-batch-size", "8", "--quantization-encoding", "float32"]
    place = ["--devices", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command = [python.parent / "max", "serve", "--model", model, "--served-model-name", "llama", *shape, *place]
    # The model is compiled for minutes; the cache spares the next time most of that.
    quiet = {"MODULAR_TELEMETRY_ENABLED": "0", "MAX_SERVE_DISABLE_TELEMETRY": "1"}
    cache = {"MODULAR_CACHE_DIR": str(python.parent.parent / "cache")}
    with Served(command, tmp_path_factory.mktemp("max") / "max.log", port, quiet | cache) as running:
        yield running


def test_without_adapters_ids_and_log_probs_are_those_of_the_base_model(
    server: Served, model: Path, tmp_path: Path
) -> None:
    config = run_on("max", server.url, model, tmp_path)
    policy = load_policy(config.model, config.lora, 0, torch.device("cpu"), lambda line: None)
    tokenizer, logged = load_tokenizer(str(model)), list[str]()
    engine = HttpEngine(MAX, policy, config.inference, tokenizer, lambda *_: None)
    try:
        sampling = Sampling(max_tokens=12, n=3, temperature=0.7, seed=3)
        startup = Startup(engine.spec, engine.fleet, tokenizer, PolicyScorer(policy), engine.prompt_text)
        engine.survey = startup.survey(sampling, logged.append)
        assert engine.survey.meaning == "untempered" and not engine.survey.takes_n
        assert engine.survey.mismatch < 1e-3
        engine.fleet.servers[0].ready = True
        prompts = [np.array(tokenizer(text)["input_ids"], np.int64) for text in ("What is 1 + 2?", "What is 30 - 4?")]
        groups = engine.generate(prompts, sampling)
        for prompt, group in zip(prompts, groups, strict=True):
            rows = [Row(prompt, one.token_ids_T, one.logprobs_T) for one in group]
            for row, own in zip(rows, PolicyScorer(policy).logprobs(rows, sampling), strict=True):
                np.testing.assert_allclose(row.logprobs_T, own, atol=1e-3)
            assert len({tuple(one.token_ids_T.tolist()) for one in group}) > 1
        again = engine.generate(prompts, sampling)
        assert [[c.text for c in g] for g in again] == [[c.text for c in g] for g in groups]
        assert engine.metrics()["mismatch_max"] < 1e-3
    finally:
        engine.shutdown()


def test_training_is_rejected_because_adapters_need_a_gpu(server: Served, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LoRA functionality is not enabled.*on a GPU.*do not run on a CPU"):
        train_quietly(run_on("max", server.url, model, tmp_path))
