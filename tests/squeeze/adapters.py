"""Adapters small enough to write in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {"q_proj": (24, 40), "v_proj": (24, 12), "down_proj": (56, 24)}


def random_factors(rank: int, layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (width, height) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            decay = torch.exp(-torch.arange(rank) / (1.0 + layer))
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(height, rank, generator=generator) * decay
    return tensors


def write_adapter(folder: Path, tensors: dict[str, Tensor], rank: int = 8, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(SHAPES), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder


def products(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """B·A of each layer, in full."""
    layers = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    return {
        layer: tensors[f"{layer}.lora_B.weight"].double() @ tensors[f"{layer}.lora_A.weight"].double()
        for layer in sorted(layers)
    }
