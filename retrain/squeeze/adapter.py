"""A LoRA adapter on disk, read one pair of factors at a time from a memory-mapped file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retrain.errors import ConfigError
from retrain.types import JsonObject

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Its methods have no types.
_open: Any = safe_open
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?")


@dataclass(frozen=True)
class Pair:
    """The tensor names of the two factors of a layer's update B·A."""

    layer: str
    a: str
    b: str


class Adapter:
    """An adapter folder, validated when opened: every A has a B, and all have the same rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder)
        if not (folder / WEIGHTS).is_file():
            hint = "  Try: save it with safe_serialization=True" if list(folder.glob("adapter_model.*")) else ""
            raise ConfigError(f"{folder} has no {WEIGHTS}.{hint}")
        try:
            self.file: Any = _open(str(folder / WEIGHTS), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{folder / WEIGHTS} cannot be read: {error}.") from error
        names = set(self.file.keys())
        self.pairs = _pair_up(names, folder)
        self.others = sorted(names - {name for pair in self.pairs for name in (pair.a, pair.b)})
        self._validate_method()
        self.rank = self._find_rank()

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        del self.file

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored."""
        tensor: Tensor = self.file.get_tensor(name)
        return tensor

    def factors(self, device: torch.device) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """Every pair with its A (r × in) and B (out × r) in at least float32; raises for non-finite values."""
        for pair in self.pairs:
            sides = []
            for name in (pair.a, pair.b):
                tensor = self.tensor(name).to(device)
                tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
                if not torch.isfinite(tensor).all():
                    raise ConfigError(f"{self.folder}: {name} contains NaN or infinity; its training diverged.")
                sides.append(tensor)
            yield pair, sides[0], sides[1]

    def _validate_method(self) -> None:
        """Raise for methods whose update is not B·A."""
        if self.config.get("use_dora") or any("lora_magnitude_vector" in name for name in self.others):
            raise ConfigError(
                f"{self.folder} is a DoRA adapter: its update is not B·A alone, so it cannot be squeezed.  "
                "Try: train without use_dora"
            )
        odd = [name for name in self.others if ".lora_" in name]
        if odd:
            raise ConfigError(f"{self.folder} has {odd[0]}, which is not part of a plain LoRA adapter.")

    def _find_rank(self) -> int:
        ranks: dict[int, str] = {}
        for pair in self.pairs:
            a, b = (tuple(self.file.get_slice(name).get_shape()) for name in (pair.a, pair.b))
            if len(a) != 2 or len(b) != 2:
                raise ConfigError(f"{self.folder}: {pair.layer} is not a linear layer (factors {a} and {b}).")
            if a[0] != b[1]:
                raise ConfigError(f"{self.folder}: the factors of {pair.layer} do not match: A is {a}, B is {b}.")
            ranks.setdefault(a[0], pair.layer)
        if len(ranks) > 1:
            some = ", ".join(f"{rank} ({layer})" for rank, layer in sorted(ranks.items()))
            raise ConfigError(f"{self.folder} mixes ranks: {some}. One rank for all layers is needed.")
        (rank,) = ranks
        # Without it, PEFT would take 8.
        stated = self.config.get("r", 8)
        if stated != rank:
            raise ConfigError(f"{self.folder}: {CONFIG} has r = {stated!r}, but its factors have rank {rank}.")
        alpha = self.config.get("lora_alpha", 8)
        if not isinstance(alpha, int | float):
            raise ConfigError(f"{self.folder}: {CONFIG} has lora_alpha = {alpha!r}, which is not a number.")
        return rank


def _read_config(folder: Path) -> JsonObject:
    if not folder.is_dir():
        raise ConfigError(f"there is no adapter folder {folder}.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not an adapter: it has no {CONFIG}.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ConfigError(f"{folder} is not a LoRA adapter: {CONFIG} has peft_type {found}.")
    return config


def _pair_up(names: set[str], folder: Path) -> list[Pair]:
    sides: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        match = _FACTOR.fullmatch(name)
        if match:
            sides.setdefault(match["layer"], {})[match["side"]] = name
    for layer, found in sides.items():
        if len(found) < 2:
            (there,) = found
            raise ConfigError(f"{folder}: {layer} has lora_{there} but no lora_{'B' if there == 'A' else 'A'}.")
    if not sides:
        raise ConfigError(f"{folder} has no LoRA factors.")
    return [Pair(layer, found["A"], found["B"]) for layer, found in sides.items()]
