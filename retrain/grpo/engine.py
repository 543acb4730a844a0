"""retrain's PyTorch engine over the model that a TRL trainer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from retrain.config.schema import Inference
from retrain.errors import RetrainError
from retrain.grpo.packed import find_length_dependence
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.attention import register
from retrain.modeling.policy import Policy, find_attention_fallback
from retrain.types import Completion, Sampling

# Generation settings that the engine implements. Others make TRL's own generation run.
SUPPORTED = {
    "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id",
    "pad_token_id", "bos_token_id", "disable_compile", "transformers_version", "use_cache", "_from_model_config",
    "max_length",
}  # fmt: skip
# Values of the other settings that have no effect; None, False and empty values have none either.
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "length_penalty": 1.0, "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0,
    "diversity_penalty": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
# The range in which each sampling setting is defined; transformers rejects most other values.
VALID: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value > 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}
# The KV cache and CUDA graphs are released after sampling if less than this share of the GPU is free.
FREE_SHARE = 0.4


# LoRA options whose effect cannot be merged into a matrix.
SPECIAL_LORA = (
    "use_dora", "target_parameters", "lora_bias", "modules_to_save", "alora_invocation_tokens",
    "trainable_token_indices",
)  # fmt: skip


class UnsupportedModelError(Exception):
    """The engine cannot sample from this model or with these settings; the message says why."""


class PromptLengthError(Exception):
    """A batch has a prompt that is empty or fills the context."""


class TrainerEngine:
    """Samples completions from a trainer's model, always with its newest weights."""

    def __init__(self, model: nn.Module, tokenizer: Any, device: torch.device, in_bf16: bool) -> None:
        self.model = model
        self._built_from = _fingerprint(model)
        causal_lm = _check_model(model)
        register()
        context = causal_lm.config.get_text_config().to_dict().get("max_position_embeddings") or 1 << 30
        policy = Policy(model, device, int(context), ())
        if policy.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"its weights are {policy.dtype}")
        # float32 weights that are trained under bf16 autocast are also sampled in bf16.
        inference = Inference(dtype="bf16") if in_bf16 and policy.dtype == torch.float32 else Inference()
        try:
            self.engine = PyTorchEngine(policy, inference, tokenizer, lambda *_: None)
        except (RetrainError, ValueError, AttributeError, TypeError, KeyError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedModelError(f"{type(causal_lm).__name__}: {error}") from error
        assert self.engine.model is not None
        if type(self.engine.model.causal_lm) is not type(causal_lm):
            raise UnsupportedModelError(f"{type(causal_lm).__name__} is not the class that transformers has for it")
        if reason := find_attention_fallback(self.engine.model.causal_lm):
            raise UnsupportedModelError(reason)

    def serves(self, model: nn.Module) -> bool:
        """Whether this engine samples from the model as it is now: the same tensors, modules, hooks and adapter."""
        return model is self.model and _fingerprint(model) == self._built_from

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, stops: Sequence[int]) -> list[Completion]:
        """One completion per prompt; equal neighbors are prefilled once."""
        if not all(0 < len(prompt) < self.engine.policy.context_length for prompt in prompts):
            context = self.engine.policy.context_length
            raise PromptLengthError(f"a prompt is empty or fills the context of {context} tokens")
        if self.engine.policy.stop_ids != tuple(stops):
            self.engine.policy.stop_ids = tuple(stops)
            self.engine.shutdown()
        self.engine.sync(None)
        groups = self.engine.generate([np.asarray(prompt, dtype=np.int64) for prompt in prompts], sampling)
        self._release_if_short_of_memory()
        return [completion for (completion,) in groups]

    def _release_if_short_of_memory(self) -> None:
        if self.engine.policy.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.engine.policy.device)
        reusable = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free + reusable < FREE_SHARE * total:
            self.engine.shutdown()
            torch.cuda.empty_cache()


def _check_model(model: nn.Module) -> Any:
    """The causal LM inside; raises for models whose weights the engine cannot read."""
    causal_lm: Any = model
    if isinstance(model, PeftModel):
        adapter = model.peft_config.get("default")
        if not isinstance(adapter, LoraConfig) or model.active_adapters != ["default"]:
            raise UnsupportedModelError("its active adapter is not a LoRA adapter with the name default")
        special = [name for name in SPECIAL_LORA if vars(adapter).get(name)]
        if special:
            raise UnsupportedModelError(f"its adapter uses {', '.join(special)}")
        causal_lm = model.get_base_model()
    config = causal_lm.config.to_dict()
    if config.get("quantization_config"):
        raise UnsupportedModelError("its weights are quantized")
    if reason := find_length_dependence(causal_lm.config):
        raise UnsupportedModelError(reason)
    if causal_lm.config.get_text_config() is not causal_lm.config:
        raise UnsupportedModelError(f"{type(causal_lm).__name__} is multimodal")
    return causal_lm


def _is_neutral(key: str, value: object) -> bool:
    is_empty = value is False or (isinstance(value, list | dict | str) and not value)
    return is_empty or (key in NEUTRAL and value == NEUTRAL[key])


def _fingerprint(model: nn.Module) -> list[tuple[object, ...]]:
    """What the engine reads from a model only once: modules, hooks, storage of tensors, and which are trained."""
    modules = [
        (id(module), _count_hooks(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    tensors = [(id(each), each.data_ptr(), each.requires_grad) for each in (*model.parameters(), *model.buffers())]
    return [*modules, *tensors, tuple(model.active_adapters) if isinstance(model, PeftModel) else ()]


def _count_hooks(hooks: Mapping[int, Callable[..., object]]) -> int:
    """Hooks that may change an output; with gradient checkpointing, every step adds one that only marks it."""
    names = [hook.__name__ if isinstance(hook, FunctionType) else "" for hook in hooks.values()]
    return sum(not name.startswith("make_inputs_require_grad") for name in names)


def read_sampling(trainer_config: Any, model_config: Any) -> tuple[Sampling, tuple[int, ...]]:
    """Sampling options and stop tokens, as `generate` takes them from the trainer's and the model's configuration."""
    config = copy.deepcopy(trainer_config)
    config.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    given = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    others = sorted(key for key in set(given) - SUPPORTED if not _is_neutral(key, given[key]))
    if others:
        raise UnsupportedModelError(f"the engine does not support {', '.join(others)}")
    invalid = [key for key, is_valid in VALID.items() if key in given and config.do_sample and not is_valid(given[key])]
    if invalid:
        raise UnsupportedModelError(f"{invalid[0]} = {given[invalid[0]]}")
    if "max_new_tokens" not in given:
        raise UnsupportedModelError("max_new_tokens is not set")
    stops = given.get("eos_token_id", [])
    sampling = Sampling(
        max_tokens=int(given["max_new_tokens"]),
        temperature=float(config.temperature) if config.do_sample else 0.0,
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=int(config.top_k or 0),
        min_p=float(config.min_p or 0.0),
        repetition_penalty=1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
    )
    return sampling, tuple(stops) if isinstance(stops, list | tuple) else (int(stops),)
