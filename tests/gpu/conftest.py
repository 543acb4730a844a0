from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from e2e.tiny import FAMILIES, PlainTokenizer, write_model, write_tokenizer
from transformers import AutoModelForCausalLM

from retrain.config import TrainConfig
from retrain.inference_engine.pytorch import PyTorchEngine, build
from retrain.modeling.policy import Policy


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def broad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose width and vocabulary are a real one's; random weights as a trainer would initialize them."""
    settings = copy.deepcopy(FAMILIES["qwen3"])
    settings.update({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 50_000})
    settings.max_position_embeddings = 4096
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("broad")
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return folder


def engine_on(policy: Policy, config: TrainConfig) -> PyTorchEngine:
    return build(policy, config.inference, PlainTokenizer(), lambda *_: None)
