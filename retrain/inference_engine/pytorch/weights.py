"""The sampling model: the policy with its adapter folded in.

It shares every tensor with the policy but the adapted matrices, of which it keeps folded copies. The policy's own
weights are never written to, so no rounding creeps into them, and decoding pays nothing for the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from retrain.backends.local.attention import ATTENTION_NAME, Attention
from retrain.backends.local.model import Policy, last_hidden


class SamplingModel:
    """A plain Hugging Face model over the policy's weights, as a backbone and a head."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        with torch.device("meta"):
            self.causal_lm: Any = AutoModelForCausalLM.from_config(
                policy.causal_lm.config, dtype=policy.dtype, attn_implementation=ATTENTION_NAME
            )
        self.causal_lm.eval().requires_grad_(False)
        self.folded = _share_weights(policy.causal_lm, self.causal_lm)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the newest adapter in."""
        for layer, weight in self.folded:
            _fold(layer, weight)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Last hidden states of a (batch, tokens) input."""
        return last_hidden(self.causal_lm, token_ids, positions, attend)


def _share_weights(source: nn.Module, target: nn.Module) -> list[tuple[LoraLayer, Tensor]]:
    """Point every parameter and buffer of `target` at `source`'s; adapted layers get a matrix of their own."""
    adapted = {name: module for name, module in source.named_modules() if isinstance(module, LoraLayer)}
    folded = []
    for name, module in target.named_modules():
        layer = adapted.get(name)
        original = layer.get_base_layer() if layer is not None else source.get_submodule(name)
        for key, parameter in original.named_parameters(recurse=False):
            own = parameter.data
            if layer is not None and key == "weight":
                own = torch.empty_like(own)
                folded.append((layer, own))
            module.register_parameter(key, nn.Parameter(own, requires_grad=False))
        for key, buffer in original.named_buffers(recurse=False):
            module.register_buffer(key, buffer, persistent=False)
    return folded


def _fold(layer: LoraLayer, weight: Tensor) -> None:
    base = layer.get_base_layer()
    if isinstance(base, nn.Linear):
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        # One fused product: the sum is rounded to the weights' precision once.
        torch.addmm(base.weight, up.to(weight.dtype), down.to(weight.dtype), alpha=layer.scaling["default"], out=weight)
    else:
        torch.add(base.weight, layer.get_delta_weight("default").to(weight.dtype), out=weight)
