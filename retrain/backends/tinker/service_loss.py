"""Which loss of the service stands for which of ours. One that is not in the table is refused before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from retrain.config.schema import Loss
from retrain.errors import ConfigError


@dataclass(frozen=True)
class ServiceLoss:
    """A loss of the service with its settings."""

    name: Literal["importance_sampling", "ppo", "cispo", "gspo"]
    settings: Mapping[str, float] | None
    reports_ours: bool = True
    """Whether the value it reports is that of the loss we asked for."""
    needs_mask: bool = False
    caps_ratios: bool = True
    """Whether `[loss] ratio_cap` is applied; the service's clipped losses have no further cap."""


def importance_sampling(loss: Loss) -> ServiceLoss:
    """Capped, it is sent as cispo: sg(min(ratio, cap)) · A · ∇logp is the gradient of both, only the value differs."""
    if not loss.ratio_cap:
        return ServiceLoss("importance_sampling", None)
    return ServiceLoss("cispo", _bounds(0.0, loss.ratio_cap), reports_ours=False)


def ppo(loss: Loss) -> ServiceLoss:
    """The same loss, without a cap."""
    return ServiceLoss("ppo", _bounds(1 - loss.clip_low, 1 + loss.clip_high), caps_ratios=False)


def cispo(loss: Loss) -> ServiceLoss:
    """The same loss; its clip is the cap."""
    return ServiceLoss("cispo", _bounds(1 - loss.clip_low, 1 + loss.clip_high))


def gspo(loss: Loss) -> ServiceLoss:
    """The same loss in its token-wise form, without a cap."""
    return ServiceLoss("gspo", _bounds(1 - loss.clip_low, 1 + loss.clip_high), needs_mask=True, caps_ratios=False)


SERVICE_LOSSES: dict[str, Callable[[Loss], ServiceLoss]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    # ppo with another denominator, which is applied to the advantages.
    "dr_grpo": ppo,
}


def service_loss(loss: Loss) -> ServiceLoss:
    """The service's loss whose gradient is that of `[loss] type`."""
    if loss.type not in SERVICE_LOSSES:
        raise ConfigError(f"[loss] type = {loss.type!r} is not possible on Tinker.  Try: {', '.join(SERVICE_LOSSES)}")
    return SERVICE_LOSSES[loss.type](loss)


def _bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}
