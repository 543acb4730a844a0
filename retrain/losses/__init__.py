"""Losses: how advantages and probability ratios of tokens become an objective.

Each built-in loss is one file here and one line in `retrain.plugins`; a dotted path names a class of yours. Losses use
methods of tensors and import no torch, so that configurations are validated without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from retrain.errors import PluginError, blaming
from retrain.losses.averages import TOKEN_MEAN, Average
from retrain.plugins import REGISTRIES

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.config.schema import Loss
    from retrain.losses.batch import TokenBatch

__all__ = ["PolicyLoss", "TinkerLoss", "build_loss"]


@dataclass(frozen=True)
class TinkerLoss:
    """A loss function of the Tinker service with its settings."""

    name: Literal["importance_sampling", "ppo", "cispo", "gspo"]
    clip: tuple[float, float] | None = None
    """Bounds on the ratio."""
    same_value: bool = True
    """Whether the service reports the value of our loss. If not, ours is clip(ratio) · A, with the same gradient."""
    caps_ratios: bool = True
    """Whether `[loss] ratio_cap` is applied; the clipped losses of the service have no further cap."""

    @property
    def settings(self) -> dict[str, float] | None:
        """Settings as the service names them."""
        return {"clip_low_threshold": self.clip[0], "clip_high_threshold": self.clip[1]} if self.clip else None

    @property
    def per_sequence(self) -> bool:
        """Whether there is one ratio per sequence, for which the service needs a mask."""
        return self.name == "gspo"

    @property
    def clips_gradient(self) -> bool:
        """Whether a clipped token has no gradient."""
        return self.name in ("ppo", "gspo")


class PolicyLoss(ABC):
    """A loss, made with the `[loss]` table."""

    average: ClassVar[Average] = TOKEN_MEAN
    """How token objectives are averaged over a step."""
    is_plain_on_policy: ClassVar[bool] = False
    """Whether, while every ratio is 1, a token's gradient is its advantage times that of its log-prob."""

    def __init__(self, settings: Loss) -> None:
        self.settings = settings

    @abstractmethod
    def objective(self, batch: TokenBatch) -> Tensor:
        """The objective of each token, to be maximized; its gradient flows through `batch.logprobs`."""

    def on_tinker(self) -> TinkerLoss | None:
        """The Tinker loss with the same gradient; None if there is none, and runs on Tinker are rejected."""
        return None


def build_loss(settings: Loss, search_paths: Sequence[str] = ()) -> PolicyLoss:
    """Make the loss that `[loss] type` names."""
    part = REGISTRIES["loss"].load(settings.type, search_paths)
    if not isinstance(part, type) or not issubclass(part, PolicyLoss):
        raise PluginError(f"loss {settings.type!r} is {part!r}; it must be a subclass of retrain.losses.PolicyLoss.")
    with blaming(f"loss {settings.type!r}", "when it was created"):
        return part(settings)
