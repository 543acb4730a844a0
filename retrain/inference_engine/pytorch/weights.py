"""The sampling model: the policy with its adapter folded in.

It shares every tensor with the policy but the adapted matrices, of which it keeps folded copies. The policy's own
weights are never written to, so no rounding creeps into them, and decoding pays nothing for the adapter. A policy that
is trained as a whole has nothing to fold: all is shared, but for copies in another precision or layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from retrain.inference_engine.pytorch.products import (
    Fp8Product,
    PackedProduct,
    Product,
    find_siblings,
    fits_fp8,
    pack_matrix,
    packed_linear,
    packs,
    replace_with,
)
from retrain.modeling.attention import ATTENTION_NAME, Attention
from retrain.modeling.policy import Policy, last_hidden


class SamplingModel:
    """A plain Hugging Face model over the policy's weights, as a backbone and a head.

    `dtype` is what it computes in; `in_fp8` keeps the matrices of its layers in 8 bits. The head's product stays the
    policy's own.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None, in_fp8: bool = False) -> None:
        self.policy = policy
        self.dtype = dtype or policy.dtype
        with torch.device("meta"):
            self.causal_lm: Any = AutoModelForCausalLM.from_config(
                policy.causal_lm.config, dtype=self.dtype, attn_implementation=ATTENTION_NAME
            )
        self.causal_lm.eval().requires_grad_(False)
        self.packs = packs(self.dtype, policy.device) and packs(policy.dtype, policy.device)
        kinds = (LoraLayer,) if policy.rank else (nn.Linear,) if self.packs else ()
        self.adapted = {n: m for n, m in policy.causal_lm.named_modules() if isinstance(m, kinds)}
        """The policy's layers whose matrices the sampling model keeps by itself."""
        self.folding: list[Callable[[], None]] = []
        """What writes each matrix that is the sampling model's own."""
        self._share_weights()
        self._own_matrices(in_fp8)
        self.packed_head: Tensor | None = None
        if self.packs and policy.has_plain_head:
            self._pack_head()
            if not policy.rank:
                self.folding.append(self._pack_head)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the newest adapter in."""
        for write in self.folding:
            write()

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Last hidden states of a (batch, tokens) input."""
        return last_hidden(self.causal_lm, token_ids, positions, attend)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        if self.packed_head is not None:
            return packed_linear(hidden, self.packed_head, None)
        return self.policy.head(hidden.to(self.policy.dtype))

    def _share_weights(self) -> None:
        """Point every parameter and buffer at the policy's, or at a copy where the precision differs."""
        head = self.causal_lm.get_output_embeddings()
        for name, module in self.causal_lm.named_modules():
            layer = self.adapted.get(name)
            original = self.policy.causal_lm.get_submodule(name)
            if isinstance(original, LoraLayer):
                original = original.get_base_layer()
            for key, parameter in original.named_parameters(recurse=False):
                is_own = layer is not None and key == "weight"
                # The head's matrix is not used here, and an adapted one is replaced below: neither needs a copy.
                shared = parameter.data if module is head or is_own else parameter.data.to(self.dtype)
                module.register_parameter(key, nn.Parameter(shared, requires_grad=False))
                if not self.policy.rank and shared.dtype != parameter.dtype:
                    self.folding.append(lambda old=parameter, own=shared: own.copy_(old.data))  # type: ignore[misc]
            for key, buffer in original.named_buffers(recurse=False):
                module.register_buffer(key, buffer, persistent=False)

    def _pack_head(self) -> None:
        self.packed_head = pack_matrix(self.policy.causal_lm.get_output_embeddings().weight.detach())

    def _own_matrices(self, in_fp8: bool) -> None:
        """Give every adapted layer a matrix of its own, those that share an input one together."""
        head = self.causal_lm.get_output_embeddings()
        left = dict(self.adapted)
        for siblings in find_siblings(self.causal_lm):
            layers = list(siblings.values())
            if layers[0] is head:
                left.pop(next(iter(siblings)), None)
            elif in_fp8 and fits_fp8(layers):
                self._replace(siblings, Fp8Product)
            elif self.packs and all(name in self.adapted for name in siblings):
                self._pack(siblings)
            elif len(siblings) > 1 and all(name in self.adapted for name in siblings):
                self._replace(siblings, Product)
            else:
                continue
            for name in siblings:
                left.pop(name, None)
        for name, layer in left.items():
            module = self.causal_lm.get_submodule(name)
            own = torch.empty_like(module.weight, dtype=self.dtype)
            module.register_parameter("weight", nn.Parameter(own, requires_grad=False))
            self.folding.append(lambda layer=layer, own=own: fold(layer, own))  # type: ignore[misc]

    def _pack(self, siblings: dict[str, nn.Linear]) -> None:
        product = replace_with(self.causal_lm, siblings, PackedProduct, self.dtype)
        assert isinstance(product, PackedProduct)

        def write() -> None:
            whole = torch.empty(product.weight.shape, dtype=self.dtype)
            for index, name in enumerate(siblings):
                fold(self.adapted[name], product.rows_of(index, whole))
            product.pack(whole)

        self.folding.append(write)

    def _replace(self, siblings: dict[str, nn.Linear], kind: type[Product]) -> None:
        product = replace_with(self.causal_lm, siblings, kind, self.dtype)
        for index, (name, old) in enumerate(siblings.items()):
            layer = self.adapted.get(name)
            own = product.rows_of(index, product.weight)
            self.folding.append(_writer(layer if layer is not None else old, product, index, own))


def _writer(layer: LoraLayer | nn.Linear, product: Product, index: int, own: Tensor) -> Callable[[], None]:
    if isinstance(layer, LoraLayer) and type(product) is Product:
        return lambda: fold(layer, own)

    def write() -> None:
        if not isinstance(layer, LoraLayer):
            product.store(index, layer.weight)
            return
        folded = torch.empty_like(layer.get_base_layer().weight)
        fold(layer, folded)
        product.store(index, folded)

    return write


def fold(layer: LoraLayer | nn.Linear, weight: Tensor) -> None:
    """Write a layer's matrix with its adapter, if it has one, folded in."""
    if not isinstance(layer, LoraLayer):
        weight.copy_(layer.weight)
        return
    base = layer.get_base_layer()
    if weight.dtype != base.weight.dtype:
        folded = torch.empty_like(base.weight)
        fold(layer, folded)
        weight.copy_(folded)
    elif isinstance(base, nn.Linear):
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        # One fused product: the sum is rounded to the weights' precision once.
        torch.addmm(base.weight, up.to(weight.dtype), down.to(weight.dtype), alpha=layer.scaling["default"], out=weight)
    else:
        torch.add(base.weight, layer.get_delta_weight("default").to(weight.dtype), out=weight)
