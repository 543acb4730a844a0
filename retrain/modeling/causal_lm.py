"""The parts of a Hugging Face causal LM that retrain uses, as protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from retrain.types import JsonObject


class ModelConfig(Protocol):
    """Configuration of a model; multimodal ones nest the text model's."""

    name_or_path: str
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None

    def get_text_config(self) -> ModelConfig:
        """The configuration of the text model."""
        ...

    def to_dict(self) -> JsonObject:
        """All settings."""
        ...


class GenerationConfig(Protocol):
    """Defaults for generation."""

    eos_token_id: int | list[int] | None


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only these rows, in this order."""
        ...


class BackboneOutput(Protocol):
    """The result of the backbone."""

    last_hidden_state: Tensor


class Backbone(Protocol):
    """A model without its head."""

    def __call__(self, **inputs: object) -> BackboneOutput:
        """A forward pass."""
        ...


class CausalLMOutput(Protocol):
    """The result of a forward pass."""

    logits: Tensor
    past_key_values: KeyValueCache


class CausalLM(Protocol):
    """A loaded model, which is also an `nn.Module`: see `module_of`."""

    config: ModelConfig
    generation_config: GenerationConfig
    base_model: Backbone

    @property
    def device(self) -> torch.device:
        """The device that holds its weights."""
        ...

    def __call__(self, **inputs: object) -> CausalLMOutput:
        """A forward pass."""
        ...

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        ...

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: object) -> Mapping[str, object]:
        """Inputs of the next forward pass."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write weights and configuration."""
        ...

    def enable_input_require_grads(self) -> None:
        """Let the embeddings' outputs require gradients."""
        ...

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, object]) -> None:
        """Enable recomputation in every layer."""
        ...

    def eval(self) -> CausalLM:
        """Disable dropout."""
        ...

    def requires_grad_(self, requires_grad: bool = ...) -> CausalLM:
        """Freeze or unfreeze all parameters."""
        ...

    def to(self, device: torch.device | str) -> CausalLM:
        """Move to a device."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name."""
        ...


def module_of(model: object) -> nn.Module:
    """The model as an `nn.Module`, which every CausalLM is."""
    assert isinstance(model, nn.Module)
    return model


def is_projection(layer: nn.Module) -> bool:
    """Whether a layer is linear and returns a product: Falcon's are a class of their own, some routers return more."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return isinstance(layer, nn.Linear)
    with torch.no_grad():
        return isinstance(layer(layer.weight.new_zeros(1, layer.in_features)), Tensor)
