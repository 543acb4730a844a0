from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from retrain.builtin import resolve_model
from retrain.config.schema import Lora, Model
from retrain.errors import ConfigError
from retrain.modeling.policy import load_policy


@pytest.mark.parametrize("rank", [0, 4])
def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path, rank: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an adapter, not a model"):
        load_policy(Model(model=str(tmp_path), lora_rank=rank), Lora(), 0, torch.device("cpu"), print)
