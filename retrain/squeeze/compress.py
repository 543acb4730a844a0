"""Compression of an adapter: best rank-k approximation of each layer's update (Eckart and Young 1936)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from retrain.errors import ConfigError
from retrain.runtime.permissions import is_writable_folder, nearest_existing, share_weights
from retrain.squeeze.adapter import CONFIG, WEIGHTS, Adapter
from retrain.squeeze.analyze import torch_device
from retrain.storage.publishing import RECORD, publish_folder, publisher
from retrain.types import JsonObject


def compress_adapter(adapter_path: str | Path, output_path: str | Path, rank: int, device: str = "cpu") -> Path:
    """Write the adapter at `rank` into `output_path`, in PEFT layout; an earlier compressed one is replaced."""
    source, target = Path(adapter_path).expanduser(), Path(output_path).expanduser()
    place = torch_device(device)
    check_target(source, target)
    with Adapter(source) as adapter:
        check_rank(rank, adapter.rank)
        tensors = {name: adapter.tensor(name) for name in adapter.others}
        for pair, a, b in adapter.factors(place):
            low_a, low_b = truncate(a, b, rank)
            tensors[pair.a] = low_a.to("cpu", adapter.tensor(pair.a).dtype).contiguous()
            tensors[pair.b] = low_b.to("cpu", adapter.tensor(pair.b).dtype).contiguous()
        config = scale_config(adapter.config, adapter.rank, rank)
    _write(target, config, tensors)
    return target


def check_rank(rank: int, source_rank: int) -> None:
    """Raise if an adapter cannot be compressed to this rank."""
    if not 1 <= rank <= source_rank:
        raise ConfigError(f"[squeeze] compress_to = {rank} is outside the adapter's rank, 1 to {source_rank}.")


@torch.no_grad()
def truncate(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best rank-k approximation of B·A, with the singular values split evenly between them."""
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.T.double())
    u, values, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = min(rank, len(values))
    roots = values[:kept].sqrt()
    low_b = torch.zeros(b.shape[0], rank, dtype=torch.float64, device=b.device)
    low_a = torch.zeros(rank, a.shape[1], dtype=torch.float64, device=a.device)
    low_b[:, :kept] = (q_b @ u[:, :kept]) * roots
    low_a[:kept] = (q_a @ v[:kept].T * roots).T
    return low_a, low_b


def scale_config(config: JsonObject, source_rank: int, rank: int) -> JsonObject:
    """The adapter's settings at another rank, with alpha adjusted to keep the scale of B·A.

    PEFT multiplies by alpha / r, and by alpha / sqrt(r) with use_rslora.
    """
    ratio = math.sqrt(rank / source_rank) if config.get("use_rslora") else rank / source_rank

    def scaled(alpha: float) -> float:
        value = alpha * ratio
        return int(value) if float(value).is_integer() else value

    # The default of PEFT.
    alpha = config.get("lora_alpha", 8)
    patterns = {name: scaled(value) for name, value in (config.get("alpha_pattern") or {}).items()}
    return config | {"r": rank, "lora_alpha": scaled(alpha), "alpha_pattern": patterns, "rank_pattern": {}}


def check_target(source: Path, target: Path) -> None:
    """Raise if the folder for a compressed adapter holds something else, or cannot be made."""
    if target.resolve() == source.resolve():
        raise ConfigError("[squeeze] output_path is the source adapter, which is not overwritten.  Try: another folder")
    held = list(target.iterdir()) if target.is_dir() else []
    if (target.exists() and not target.is_dir()) or (held and not (target / CONFIG).is_file()):
        raise ConfigError(f"[squeeze] output_path = {str(target)!r} is not an adapter and is not overwritten.")
    if held and (publisher(target) or not (target / RECORD).is_file()):
        raise ConfigError(
            f"[squeeze] output_path = {str(target)!r} is an adapter without retrain's record of a compression, and is "
            "not overwritten.  Try: another folder"
        )
    above = nearest_existing(target.parent)
    if not is_writable_folder(above):
        raise ConfigError(
            f"[squeeze] output_path = {str(target)!r}: {above} cannot be written to.  Try: another folder"
        )


def _write(target: Path, config: JsonObject, tensors: dict[str, Tensor]) -> None:
    """Write to a temporary folder and rename it, so that no partial adapter is left."""

    def fill(draft: Path) -> None:
        save_file(tensors, str(draft / WEIGHTS), metadata={"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        share_weights(draft)

    try:
        publish_folder(target, fill)
    except OSError as error:
        raise ConfigError(f"[squeeze] output_path = {str(target)!r} cannot be written: {error}.") from error
