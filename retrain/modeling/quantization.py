"""A quantized base model: frozen matrices in 4 or 8 bits, dequantized for every product.

bitsandbytes quantizes, dequantizes and multiplies 4-bit matrices. Its 8-bit code is not used: it also quantizes the
inputs and treats outliers per batch, so a token's log-prob would depend on its neighbors, and sampler and trainer
would disagree.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from retrain.modeling.causal_lm import CausalLM, is_projection, module_of
from retrain.runtime.packages import missing

PACKAGE = "bitsandbytes"
# Weights per scale in 4 bits.
BLOCK = 64
INT8_MAX = 127.0
# Keeps the scale of all-zero values non-zero.
LEAST_SCALE = 1e-8


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose matrix is quantized: uint8 holds two NF4 values, int8 one value."""

    weight: Tensor
    scales: Tensor
    """One per block of NF4 values, or per output of an int8 matrix."""

    def __init__(self, layer: nn.Linear | Conv1D, kind: str, device: torch.device) -> None:
        # A Conv1D, as in GPT-2, has its matrix transposed.
        matrix = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        outputs, inputs = matrix.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        del self.weight
        stored, scales = _quantize(matrix.to(device).contiguous(), kind)
        # Buffers: an integer parameter cannot be made trainable, not even by mistake.
        self.register_buffer("weight", stored)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    @property
    def kind(self) -> str:
        """The value of `[model] quantization`."""
        return "int8" if self.weight.dtype == torch.int8 else "nf4"

    def forward(self, inputs: Tensor) -> Tensor:
        """The product with the dequantized matrix."""
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        shape = (self.out_features, self.in_features)
        if torch.is_grad_enabled() and inputs.requires_grad:
            outputs: Tensor = FrozenProduct.apply(inputs, self.weight, self.scales, bias, shape)  # type: ignore[no-untyped-call]
            return outputs
        return _multiply(inputs, self.weight, self.scales, bias, shape)


class FrozenProduct(torch.autograd.Function):
    """The same with a gradient of the inputs. The matrix is dequantized again in the backward pass, not kept."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, stored: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        """inputs · Wᵀ + bias."""
        ctx.save_for_backward(stored, scales)
        ctx.shape = shape
        return _multiply(inputs, stored, scales, bias, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """gradient · W."""
        stored, scales = ctx.saved_tensors
        if stored.dtype == torch.int8:
            inputs = (gradient * scales).to(gradient.dtype) @ widen(stored, gradient.dtype)
        else:
            inputs = gradient @ dequantize(stored, scales, ctx.shape, gradient.dtype)
        return inputs, None, None, None, None


# An operator: the compiler would keep the converted matrix of the forward pass for the backward pass.
@torch.library.custom_op("retrain::widen", mutates_args=())
def widen(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """An int8 matrix in floating point, without its scales."""
    return stored.to(dtype)


@widen.register_fake
def _(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(stored, dtype=dtype)


def _multiply(inputs: Tensor, stored: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
    if stored.dtype == torch.int8:
        # Integers up to 127 are exact in bf16, so outputs are scaled instead of the matrix.
        outputs = F.linear(inputs, stored.to(inputs.dtype)) * scales
        # Not without need: compiled by torch 2.11, a conversion that changes nothing loses the gradient.
        outputs = outputs if outputs.dtype == inputs.dtype else outputs.to(inputs.dtype)
        return outputs if bias is None else outputs + bias
    # One kernel for a few rows on a GPU; more rows, and CPUs, dequantize the matrix first.
    product: Tensor = torch.ops.bitsandbytes.gemm_4bit(inputs, stored, shape, scales, BLOCK, "nf4", bias=bias)
    return product


def dequantize(stored: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix in floating point."""
    if stored.dtype == torch.int8:
        return (stored * scales[:, None]).to(dtype)
    matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(stored, scales, BLOCK, "nf4", shape, dtype)
    return matrix


def _quantize(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "int8":
        # Here, so that every device stores the same values.
        scales = matrix.float().abs().amax(1).clamp_min(LEAST_SCALE) / INT8_MAX
        return (matrix.float() / scales[:, None]).round().to(torch.int8), scales
    functional = importlib.import_module(f"{PACKAGE}.functional")
    stored, state = functional.quantize_4bit(matrix, blocksize=BLOCK, quant_type="nf4")
    return stored, state.absmax


def quantize_layers(causal_lm: CausalLM, kind: str, device: torch.device) -> None:
    """Quantize every linear layer but the head, one at a time on the device."""
    if kind == "nf4":
        require_package()
    model, head = module_of(causal_lm), causal_lm.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if layer is not head and (is_projection(layer) or isinstance(layer, Conv1D)):
            model.set_submodule(name, QuantizedLinear(layer, kind, device))


def require_package() -> None:
    """Import bitsandbytes, which registers its operations; an error names the command that installs it."""
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:
        raise missing(PACKAGE, '[model] quantization = "nf4"') from error


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    """The quantized layers of a model."""
    return [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
