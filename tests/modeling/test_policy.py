from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from retrain.builtin import resolve_model
from retrain.config.schema import Lora, Model
from retrain.errors import BackendError, ConfigError
from retrain.modeling.policy import load_policy

CPU = torch.device("cpu")


@pytest.mark.parametrize("rank", [0, 4])
def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path, rank: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an adapter, not a model"):
        load_policy(Model(model=str(tmp_path), lora_rank=rank), Lora(), 0, CPU, print)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    weights = model.state_dict()
    lacking = next(name for name in weights if name.endswith("q_proj.weight"))
    del weights[lacking]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=f"lacks 1 weight of a causal language model: {lacking}"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)


def test_a_classifier_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(resolve_model("builtin:tiny"), num_labels=2, tie_word_embeddings=False)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 weight of a causal language model: lm_head\.weight"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_weights_that_are_not_finite_is_refused_as_such(tmp_path: Path, value: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    weights = model.state_dict()
    next(weight for name, weight in weights.items() if name.endswith("up_proj.weight"))[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="its weights give logits that are not finite"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)
