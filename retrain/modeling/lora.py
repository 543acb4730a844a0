"""A linear layer with its adapter as one operator, for layers that are compiled.

The compiler sees one operation instead of ten, and the adapter's product is added in place: to the compiler's code,
it is another tensor of the size of the output, written and read once more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

ADAPTER = "default"


class FusedLoraLinear(Linear):  # type: ignore[misc]
    """PEFT's layer, with the operator as its forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output."""
        if self.disable_adapters or self.merged:
            outputs: Tensor = super().forward(x, *args, **kwargs)
            return outputs
        base, down, up = self.base_layer, self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        outputs = adapted_linear(x, base.weight, base.bias, down, up, self.scaling[ADAPTER])[0]
        return outputs


def fuse_adapters(adapted: nn.Module) -> None:
    """Use the operator in every layer that is computed the plain way; the others stay as they are."""
    for module in adapted.modules():
        if type(module) is Linear and _is_plain(module):
            # Same parameters, names and state: only the forward pass differs.
            module.__class__ = FusedLoraLinear


def _is_plain(layer: Linear) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and not base.weight.requires_grad
        and layer.active_adapters == [ADAPTER]
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
        and not layer.lora_variant
        and layer.lora_A[ADAPTER].weight.dtype == base.weight.dtype
        and layer.lora_B[ADAPTER].bias is None
    )


@torch.library.custom_op("retrain::adapted_linear", mutates_args=())
def adapted_linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Outputs of the layer, and the inputs times the adapter's first matrix."""
    rows = inputs.flatten(0, -2)
    outputs, inner = F.linear(rows, weight, bias), rows @ down.T
    outputs.addmm_(inner, up.T, alpha=scaling)
    return outputs.view(*inputs.shape[:-1], len(weight)), inner


@adapted_linear.register_fake
def _(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(*inputs.shape[:-1], len(weight)), inputs.new_empty(inputs.shape[:-1].numel(), len(down))


@torch.library.custom_op("retrain::adapted_linear_backward", mutates_args=())
def _adapted_linear_backward(
    gradient: Tensor, inputs: Tensor, inner: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_outputs, rows = gradient.flatten(0, -2), inputs.flatten(0, -2)
    of_inputs, of_inner = of_outputs @ weight, of_outputs @ up
    of_inputs.addmm_(of_inner, down, alpha=scaling)
    of_down, of_up = (of_inner.T @ rows).mul_(scaling), (of_outputs.T @ inner).mul_(scaling)
    return of_inputs.view(inputs.shape), of_down, of_up


@_adapted_linear_backward.register_fake
def _(
    gradient: Tensor, inputs: Tensor, inner: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.new_empty(inputs.shape), torch.empty_like(down), torch.empty_like(up)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, _, down, up, ctx.scaling = inputs
    ctx.save_for_backward(rows, output[1], weight, down, up)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_inputs, of_down, of_up = _adapted_linear_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scaling)
    return of_inputs, None, None, of_down, of_up, None


adapted_linear.register_autograd(_differentiate, setup_context=_save)
