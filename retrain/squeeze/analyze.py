"""The variance of an adapter that each rank keeps: V(k) = Σ_{i≤k} s² / Σ s², over the singular values of each B·A.

With BᵀB = R_BᵀR_B and AAᵀ = R_AᵀR_A the singular values of B·A are those of the r × r core R_B·R_Aᵀ; the product
itself, as large as the layer, is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from retrain.errors import ConfigError
from retrain.squeeze.adapter import Adapter


@dataclass(frozen=True)
class RankVariance:
    """The share of variance that one rank keeps, over layers."""

    rank: int
    mean: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class Analysis:
    """The variance that every evaluated rank keeps, and the smallest rank that keeps enough."""

    source_rank: int
    layers: int
    untrained: tuple[str, ...]
    """Layers whose update is zero; they are ignored."""
    ranks: tuple[RankVariance, ...]
    min_variance_retention: float
    recommended_rank: int
    """The source rank if no evaluated rank keeps enough."""

    def table(self) -> str:
        """The analysis as text, the recommended rank marked."""
        lines = [f"{'Rank':>6}{'Mean Var%':>11}{'Min Var%':>10}{'Max Var%':>10}"]
        for row in self.ranks:
            mark = "  <--" if row.rank == self.recommended_rank else ""
            shares = f"{100 * row.mean:>10.2f}%{100 * row.minimum:>9.2f}%{100 * row.maximum:>9.2f}%"
            lines.append(f"{row.rank:>6}{shares}{mark}")
        return "\n".join(lines)


def analyze_adapter(
    adapter_path: str | Path,
    target_ranks: Sequence[int] = (),
    min_variance_retention: float = 0.95,
    device: str = "cpu",
) -> Analysis:
    """Analyze a PEFT adapter folder; without `target_ranks`, powers of two up to its rank and the rank itself."""
    place = torch_device(device)
    with Adapter(Path(adapter_path).expanduser()) as adapter:
        ranks = choose_ranks(target_ranks, adapter.rank)
        shares, untrained = [], []
        for pair, a, b in adapter.factors(place):
            kept = variance_kept(singular_values(a, b))
            if kept is None:
                untrained.append(pair.layer)
            else:
                shares.append([kept[rank - 1] for rank in ranks])
        source_rank, layers = adapter.rank, len(adapter.pairs)
    if not shares:
        raise ConfigError(f"{adapter_path}: the update of every layer is zero, so the adapter was never trained.")
    table = np.array(shares)
    rows = tuple(
        RankVariance(rank, float(column.mean()), float(column.min()), float(column.max()))
        for rank, column in zip(ranks, table.T, strict=True)
    )
    enough = [row.rank for row in rows if row.mean >= min_variance_retention]
    recommended = enough[0] if enough else source_rank
    return Analysis(source_rank, layers, tuple(untrained), rows, min_variance_retention, recommended)


def choose_ranks(target_ranks: Sequence[int], source_rank: int) -> list[int]:
    """The ranks to evaluate, ascending."""
    if not target_ranks:
        powers = [2**n for n in range(source_rank.bit_length()) if 2**n <= source_rank]
        return sorted({*powers, source_rank})
    wrong = [rank for rank in target_ranks if not 1 <= rank <= source_rank]
    if wrong:
        raise ConfigError(f"[squeeze] target_ranks has {wrong[0]}, but the adapter has rank {source_rank}.")
    return sorted(set(target_ranks))


@torch.no_grad()
def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """The r singular values of B·A, largest first, in float64; zeros where a layer is narrower than r."""
    core = gram_root(b) @ gram_root(a.T).T
    values: Tensor = torch.linalg.svdvals(core).cpu()
    return values


def gram_root(matrix: Tensor) -> Tensor:
    """An r × r matrix R with RᵀR = MᵀM, like the R of a QR decomposition at a quarter of the cost.

    Squaring loses half the digits of small singular values; in float64 the rest is more than enough.
    """
    precise = matrix.double()
    values, vectors = torch.linalg.eigh(precise.T @ precise)
    root: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return root


def variance_kept(values: Tensor) -> np.ndarray | None:
    """V(1) to V(r); None if all singular values are zero."""
    squares = values.numpy() ** 2
    total = squares.sum()
    # Rounding could push the last one just over 1.
    return np.minimum(1.0, squares.cumsum() / total) if total > 0 else None


def torch_device(name: str) -> torch.device:
    """Parse a device name and check that the device works."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=torch.float64)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f'[squeeze] device = {name!r} cannot be used: {reason}.  Try: device = "cpu"') from error
    return device
