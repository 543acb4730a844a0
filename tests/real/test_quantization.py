"""A base quantized by the real bitsandbytes, on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.runs import fake_config, rows_without_times, train_quietly
from e2e.tiny import config_for, policy_for
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from retrain.config import TrainConfig
from tests.backends import quantized

from .conftest import Prepare

pytestmark = pytest.mark.real

KINDS = pytest.mark.parametrize("kind", ["int8", "nf4"])
FAMILIES = pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gpt2"])


@pytest.fixture(scope="module", autouse=True)
def bitsandbytes(side_venv: Prepare) -> None:
    """Installed without its dependencies, which are here, and imported from there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        python = side_venv("bitsandbytes", [["install", "--no-deps", "bitsandbytes==0.50.2"]])
        sys.path.append(str(next((python.parent.parent / "lib").glob("python3*")) / "site-packages"))
        importlib.invalidate_caches()


@KINDS
@FAMILIES
def test_sampler_and_trainer_agree(kind: str, family: str, tmp_path: Path) -> None:
    quantized.check_sampler_and_trainer_agree(tmp_path, kind, family)


@KINDS
@FAMILIES
def test_gradients_are_those_of_the_dequantized_model(kind: str, family: str, tmp_path: Path) -> None:
    quantized.check_it_is_the_model_with_the_dequantized_matrices(tmp_path, kind, family)


@KINDS
def test_it_learns_and_resumes_to_the_bit(kind: str, tiny: Path, tmp_path: Path) -> None:
    quantized.check_learning_and_an_exact_resume(tiny, tmp_path, kind)


@KINDS
def test_the_adapter_loads_with_plain_peft(kind: str, tiny: Path, tmp_path: Path) -> None:
    quantized.check_the_adapter_loads_with_plain_peft(tiny, tmp_path, kind)


@KINDS
def test_copies_share_the_quantized_matrices(kind: str, tiny: Path) -> None:
    quantized.check_copies_share_the_quantized_matrices(tiny, kind)


@KINDS
def test_a_fresh_adapter_has_the_precision_of_the_model(kind: str, tiny: Path) -> None:
    quantized.check_a_fresh_adapter_is_the_first_one(tiny, kind)


@KINDS
def test_compiled_layers_keep_only_the_quantized_matrix(kind: str) -> None:
    quantized.check_compiled_layers_keep_only_the_quantized_matrix(kind)


def test_nf4_is_that_of_transformers(tiny: Path) -> None:
    policy = policy_for(config_for(tiny, model__quantization="nf4"), trained=False)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)  # type: ignore[no-untyped-call]
    other: Any = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, quantization_config=settings, attn_implementation="eager"
    )
    for name, layer in policy.causal_lm.named_modules():  # type: ignore[attr-defined]
        if name.endswith(".base_layer"):
            theirs = other.get_submodule(name.removesuffix(".base_layer")).weight
            assert torch.equal(layer.weight, theirs.data)
            assert torch.equal(layer.scales, theirs.quant_state.absmax)


@KINDS
def test_a_run_resumes_where_it_was_stopped(kind: str, tiny: Path, tmp_path: Path) -> None:
    def run_of(folder: Path, **overrides: Any) -> TrainConfig:
        folder.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "backend__backend": "local",
            "backend__devices": "cpu",
            "model__lora_rank": 4,
            "model__quantization": kind,
            "training__max_tokens": 16,
            "training__lr": 1e-2,
            "reward__custom_function": "score_length",
        }
        return fake_config(tiny, folder, **settings | overrides)

    _, printed = train_quietly(run_of(tmp_path / "whole"))
    assert f"{kind} weights" in printed
    train_quietly(run_of(tmp_path / "cut", training__max_steps=2))
    train_quietly(run_of(tmp_path / "cut", resume__from=str(tmp_path / "cut" / "logs")))
    whole, cut = (rows_without_times(tmp_path / name / "logs") for name in ("whole", "cut"))
    assert whole == cut
    trained = [row for row in whole if row["ratio_mean"] is not None]
    assert trained
    assert all(abs(row["ratio_mean"] - 1) < 1e-4 for row in trained)
