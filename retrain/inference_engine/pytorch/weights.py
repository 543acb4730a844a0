"""The sampling model: the policy with its adapter merged.

It shares every tensor with the policy except the adapted matrices, of which it keeps merged copies. The policy's own
weights are never written, so no rounding accumulates, and decoding does not pay for the adapter. In full fine-tuning
all tensors are shared, except copies in another precision or layout.

With a quantized base model, and in small bf16 models, nothing is merged: the adapter is applied as in training.
Rounding to bf16 loses updates below 0.2% of a weight, and small models are sensitive to that.

Where memory is short, nothing is copied: the adapter is merged into the policy's own matrices for the duration of
sampling, and they are restored, bit for bit, from a copy in host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from retrain.capacity.sampling import Merging
from retrain.inference_engine.pytorch.products import (
    Fp8Product,
    PackedProduct,
    Part,
    Product,
    UnmergedLinear,
    find_siblings,
    fits_fp8,
    packs,
    replace_with,
)
from retrain.modeling.attention import SAMPLING_NAME, Attention, attending
from retrain.modeling.causal_lm import module_of
from retrain.modeling.policy import Policy, last_hidden
from retrain.modeling.quantization import QuantizedLinear
from retrain.modeling.torch_internals import pack_matrix, packed_linear


class SmallBatch(Protocol):
    """Interface of matrix products of a few rows; small_batch.py implements it in Triton."""

    def takes(self, weight: Tensor) -> bool:
        """Whether this matrix is supported."""
        ...

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, for any number of rows."""
        ...


class SamplingModel:
    """A plain Hugging Face model over the policy's weights, as a backbone and a head.

    `dtype` is its compute precision; `in_fp8` stores the matrices of its layers in 8 bits. The head is the policy's.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype | None = None,
        in_fp8: bool = False,
        merging: Merging = "copies",
        small_batch: SmallBatch | None = None,
    ) -> None:
        self.policy = policy
        self.originals: list[tuple[Tensor, Tensor]] | None = None
        """The policy's matrices that the adapter is merged into in place, and their copies in host memory."""
        self.dtype = dtype or policy.dtype
        with torch.device("meta"):
            self.causal_lm: Any = AutoModelForCausalLM.from_config(
                # A copy: the attention would otherwise be written into the configuration of the trained model.
                copy.deepcopy(policy.causal_lm.config),
                dtype=self.dtype,
                attn_implementation=SAMPLING_NAME,
            )
        self.causal_lm.eval().requires_grad_(False)
        self.packs = packs(self.dtype, policy.device) and packs(policy.dtype, policy.device)
        kinds = (LoraLayer,) if policy.rank else (nn.Linear,) if self.packs else ()
        modules = module_of(policy.causal_lm).named_modules()
        self.merging = merging
        self.adapted = {n: m for n, m in modules if isinstance(m, kinds) and not self._is_unmerged(m)}
        """Policy layers whose matrices the sampling model copies."""
        self.merge_ops: list[Callable[[], object]] = []
        """Functions that update those copies."""
        self._share_weights()
        self._share_unmerged()
        if merging == "in-place":
            self._save_originals()
        else:
            self._allocate_merged(in_fp8)
        if small_batch is not None:
            self._multiply_small_batches(small_batch)
        self.packed_head: Tensor | None = None
        if self.packs and policy.has_plain_head:
            self._pack_head()
            if not policy.rank or policy.causal_lm.get_output_embeddings().weight.requires_grad:
                self.merge_ops.append(self._pack_head)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the newest adapter."""
        for write in self.merge_ops:
            write()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context for sampling: an adapter that is merged in place is merged only inside it."""
        if self.originals is None:
            yield
            return
        for layer in self._lora_layers():
            merge_adapter(layer, layer.get_base_layer().weight.data)
        try:
            yield
        finally:
            for weight, original in self.originals:
                weight.copy_(original, non_blocking=True)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Last hidden states of a (batch, tokens) input."""
        with attending(attend):
            return last_hidden(self.causal_lm, token_ids, positions)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        if self.packed_head is not None:
            return packed_linear(hidden, self.packed_head, None)
        return self.policy.head(hidden.to(self.policy.dtype))

    def _share_weights(self) -> None:
        """Share every parameter and buffer with the policy, or copy it where the precision differs."""
        head = self.causal_lm.get_output_embeddings()
        for name, module in self.causal_lm.named_modules():
            layer = self.adapted.get(name)
            original = module_of(self.policy.causal_lm).get_submodule(name)
            if isinstance(original, LoraLayer):
                original = original.get_base_layer()
            if isinstance(original, QuantizedLinear):
                continue
            for key, parameter in original.named_parameters(recurse=False):
                is_own = layer is not None and key == "weight"
                # The head is not used here, and adapted matrices are replaced below: neither needs a copy.
                shared = parameter.data if module is head or is_own else parameter.data.to(self.dtype)
                module.register_parameter(key, nn.Parameter(shared, requires_grad=False))
                is_trained = not self.policy.rank or parameter.requires_grad
                if is_trained and shared.dtype != parameter.dtype:
                    self.merge_ops.append(lambda old=parameter, own=shared: own.copy_(old.data))  # type: ignore[misc]
            for key, buffer in original.named_buffers(recurse=False):
                module.register_buffer(key, buffer, persistent=False)

    def _is_unmerged(self, layer: nn.Module) -> bool:
        """Whether a layer's adapter is applied as in training."""
        if not isinstance(layer, LoraLayer):
            return isinstance(layer, QuantizedLinear)
        base = layer.get_base_layer()
        return isinstance(base, QuantizedLinear) or (self.merging == "never" and isinstance(base, nn.Linear))

    def _share_unmerged(self) -> None:
        """Share layers whose adapter is not merged, and quantized ones."""
        for name, layer in module_of(self.policy.causal_lm).named_modules():
            if isinstance(layer, LoraLayer) and self._is_unmerged(layer):
                unmerged = UnmergedLinear(layer, self.dtype)
                self.causal_lm.set_submodule(name, unmerged)
                self.merge_ops.append(unmerged.refresh)
            elif isinstance(layer, QuantizedLinear) and not name.endswith(".base_layer"):
                self.causal_lm.set_submodule(name, layer)

    def _pack_head(self) -> None:
        self.packed_head = pack_matrix(self.policy.causal_lm.get_output_embeddings().weight.detach())

    def _allocate_merged(self, in_fp8: bool) -> None:
        """Allocate the merged matrices; siblings share one."""
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
            self.merge_ops.append(lambda layer=layer, own=own: merge_adapter(layer, own))  # type: ignore[misc]

    def _lora_layers(self) -> list[LoraLayer]:
        return [layer for layer in self.adapted.values() if isinstance(layer, LoraLayer)]

    def _save_originals(self) -> None:
        self.originals = []
        for layer in self._lora_layers():
            base = layer.get_base_layer()
            original = torch.empty_like(base.weight, device="cpu", pin_memory=self.policy.device.type == "cuda")
            self.originals.append((base.weight.data, original.copy_(base.weight.data)))

    def _multiply_small_batches(self, small_batch: SmallBatch) -> None:
        """Use these products for all plain matrices but the head, which is the policy's."""
        head = self.causal_lm.get_output_embeddings()
        for name, module in list(self.causal_lm.named_modules()):
            product = module.product if isinstance(module, Part) else None
            if type(module) is nn.Linear and module is not head:
                bias = module.bias.data if module.bias is not None else None
                product = Product(module.weight.data, bias, [module.out_features])
                self.causal_lm.set_submodule(name, Part(product, 0))
            if type(product) is Product and small_batch.takes(product.weight):
                product.linear = small_batch.linear

    def _join(self, siblings: dict[str, nn.Linear], kind: type[Product]) -> Product:
        """One product for siblings; its biases follow those of the policy, which full fine-tuning changes."""
        product = replace_with(self.causal_lm, siblings, kind, self.dtype)
        if product.bias is not None:
            biases = [layer.bias.data for layer in siblings.values()]
            self.merge_ops.append(lambda: torch.cat(biases, out=product.bias))
        return product

    def _pack(self, siblings: dict[str, nn.Linear]) -> None:
        product = self._join(siblings, PackedProduct)
        assert isinstance(product, PackedProduct)

        def write() -> None:
            merged = torch.empty(product.weight.shape, dtype=self.dtype)
            for index, name in enumerate(siblings):
                merge_adapter(self.adapted[name], product.rows_of(index, merged))
            product.pack(merged)

        self.merge_ops.append(write)

    def _replace(self, siblings: dict[str, nn.Linear], kind: type[Product]) -> None:
        product = self._join(siblings, kind)
        for index, (name, old) in enumerate(siblings.items()):
            layer = self.adapted.get(name)
            own = product.rows_of(index, product.weight)
            self.merge_ops.append(_writer(layer if layer is not None else old, product, index, own))


def _writer(layer: LoraLayer | nn.Linear, product: Product, index: int, own: Tensor) -> Callable[[], None]:
    if isinstance(layer, LoraLayer) and type(product) is Product:
        return lambda: merge_adapter(layer, own)

    def write() -> None:
        if not isinstance(layer, LoraLayer):
            product.store(index, layer.weight)
            return
        merged = torch.empty_like(layer.get_base_layer().weight)
        merge_adapter(layer, merged)
        product.store(index, merged)

    return write


def merge_adapter(layer: LoraLayer | nn.Linear, weight: Tensor) -> None:
    """Write a layer's matrix into `weight`, with its adapter merged."""
    if not isinstance(layer, LoraLayer):
        weight.copy_(layer.weight)
        return
    base = layer.get_base_layer()
    if weight.dtype != base.weight.dtype:
        merged = torch.empty_like(base.weight)
        merge_adapter(layer, merged)
        weight.copy_(merged)
    elif isinstance(base, nn.Linear):
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        # One fused product: the sum is rounded once. `weight` may be the base's own.
        torch.addmm(base.weight, up.to(weight.dtype), down.to(weight.dtype), alpha=layer.scaling["default"], out=weight)
    else:
        torch.add(base.weight, layer.get_delta_weight("default").to(weight.dtype), out=weight)
