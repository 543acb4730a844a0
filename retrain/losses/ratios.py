"""Operations on importance ratios that losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.config.schema import Loss

# exp(20) is beyond any meaningful ratio, and far from overflow.
MAX_LOG_RATIO = 20.0


def cap(ratios: Tensor, settings: Loss) -> Tensor:
    """Truncated importance sampling: min(ratio, ratio_cap) in value; a capped token still has a gradient."""
    if not settings.ratio_cap:
        return ratios
    return ratios * (ratios.detach().clamp(max=settings.ratio_cap) / ratios.detach())


def clip(ratios: Tensor, settings: Loss) -> Tensor:
    """Ratios clipped to [1 - clip_low, 1 + clip_high]."""
    return ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def clip_bounds(settings: Loss) -> tuple[float, float]:
    """The bounds of `clip`."""
    return 1 - settings.clip_low, 1 + settings.clip_high


def pessimistic(ratios: Tensor, advantages: Tensor, settings: Loss) -> Tensor:
    """min(ratio · A, clip(ratio) · A): clipping never improves the objective."""
    return (ratios * advantages).minimum(clip(ratios, settings) * advantages)
