"""Linear layers of the sampling model: fused siblings, packed CPU weights, fp8, and adapters over quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from retrain.inference_engine.pytorch.cache import FP8, FP8_MAX
from retrain.modeling.torch_internals import has_packed_linear, pack_matrix, packed_linear, scaled_fp8_product

# Sibling layers of standard models, which share their input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """One matrix product for several linear layers, computed when the first of them is called.

    A layer called with another input recomputes it: a model that feeds its layers differently is only slower.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        self.weight, self.bias, self.sizes = weight, bias, list(sizes)
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.source: Tensor | None = None
        self.results: tuple[Tensor, ...] = ()
        self.untaken = 0

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """The output of one layer."""
        if len(self.sizes) == 1:
            return self.compute(inputs)
        if self.source is not inputs:
            self.source, self.results = inputs, torch.split(self.compute(inputs), self.sizes, dim=-1)
            self.untaken = len(self.sizes)
        self.untaken -= 1
        result = self.results[index]
        if self.untaken == 0:
            self.source, self.results = None, ()
        return result

    def compute(self, inputs: Tensor) -> Tensor:
        """All outputs, concatenated."""
        return self.linear(inputs, self.weight, self.bias)

    def store(self, index: int, weight: Tensor) -> None:
        """Store one layer's matrix."""
        self.rows_of(index, self.weight).copy_(weight)

    def rows_of(self, index: int, held: Tensor) -> Tensor:
        """One layer's rows of a tensor with one row per output channel."""
        start = sum(self.sizes[:index])
        return held[start : start + self.sizes[index]]


class PackedProduct(Product):
    """The same in float32 on the CPU, with the matrix in oneDNN's layout: small batches run a third faster."""

    def compute(self, inputs: Tensor) -> Tensor:
        """One product."""
        return packed_linear(inputs, self.packed, self.bias)

    def pack(self, weight: Tensor) -> None:
        """Store the matrix of all layers."""
        self.packed = pack_matrix(weight)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed products are available."""
    return device.type == "cpu" and dtype == torch.float32 and has_packed_linear()


class Fp8Product(Product):
    """The same with 8-bit floats; weights are scaled per output channel, inputs per token."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__(weight, bias, sizes)
        self.scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)

    def compute(self, inputs: Tensor) -> Tensor:
        """One scaled product with a bf16 result."""
        flat, scales = to_fp8(inputs.reshape(-1, inputs.shape[-1]))
        outputs = scaled_fp8_product(flat, self.weight, scales, self.scales)
        outputs = outputs.view(*inputs.shape[:-1], -1)
        return outputs if self.bias is None else outputs + self.bias

    def store(self, index: int, weight: Tensor) -> None:
        """Quantize and store one layer's matrix."""
        values, scales = to_fp8(weight)
        # Copied as bytes: few operations support fp8.
        self.rows_of(index, self.weight).view(torch.uint8).copy_(values.view(torch.uint8))
        self.rows_of(index, self.scales).copy_(scales)


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row scaled to fill the range of e4m3, and the scales."""
    scales = rows.abs().amax(1).float().clamp_min(1e-12) / FP8_MAX
    return (rows.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


class Part(nn.Module):
    """Replaces a linear layer; its output is part of a product."""

    def __init__(self, product: Product, index: int) -> None:
        super().__init__()
        self.product, self.index = product, index
        self.weight = nn.Parameter(product.rows_of(index, product.weight), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output."""
        return self.product.part(self.index, inputs)


class UnmergedLinear(nn.Module):
    """A quantized layer and its own copy of the adapter, computed as the trainer does.

    A copy: CUDA graphs read these tensors, while runs that share a model exchange those of the policy.
    """

    def __init__(self, layer: LoraLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.scaling = layer.get_base_layer(), layer.scaling["default"]
        self.trained = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        self.down, self.up = (nn.Parameter(weight.to(dtype, copy=True), False) for weight in self.trained)

    def forward(self, inputs: Tensor) -> Tensor:
        """Both products, added."""
        adapter = F.linear(F.linear(inputs, self.down), self.up) * self.scaling
        outputs: Tensor = self.base(inputs) + adapter
        return outputs

    def refresh(self) -> None:
        """Copy the newest adapter."""
        self.down.copy_(self.trained[0])
        self.up.copy_(self.trained[1])


def find_siblings(model: nn.Module) -> list[dict[str, nn.Linear]]:
    """Linear layers by name, grouped where one product can serve several."""
    found: list[dict[str, nn.Linear]] = []
    for prefix, parent in model.named_modules():
        own = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in SIBLINGS:
            if all(name in own for name in names) and _can_share([own[name] for name in names]):
                found.append({f"{prefix}.{name}": own.pop(name) for name in names})
        found += [{f"{prefix}.{name}" if prefix else name: child} for name, child in own.items()]
    return found


def _can_share(layers: Sequence[nn.Linear]) -> bool:
    first = layers[0]
    alike = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    return len(alike) == 1 and first.weight.device.type != "meta"


def fits_fp8(layers: Sequence[nn.Linear]) -> bool:
    """Whether the hardware supports fp8 products of these sizes."""
    return all(size % 16 == 0 for layer in layers for size in (layer.in_features, layer.out_features))


def replace_with(model: nn.Module, siblings: dict[str, nn.Linear], kind: type[Product], dtype: torch.dtype) -> Product:
    """Replace the layers by parts of one product, whose matrices are stored later."""
    layers = list(siblings.values())
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    sizes = [layer.out_features for layer in layers]
    shape, device = (sum(sizes), layers[0].in_features), layers[0].weight.device
    if kind is PackedProduct:
        # The matrix is kept in packed form; this placeholder has its shape and no memory.
        weight = torch.empty((), dtype=dtype).expand(shape)
    else:
        weight = torch.empty(shape, dtype=FP8 if kind is Fp8Product else dtype, device=device)
    product = kind(weight, torch.cat(biases) if biases else None, sizes)
    for index, name in enumerate(siblings):
        model.set_submodule(name, Part(product, index))
    return product
