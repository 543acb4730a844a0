"""The `cispo` loss (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.losses import PolicyLoss, TinkerLoss
from retrain.losses.ratios import clip, clip_bounds

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.losses.batch import TokenBatch


class CISPO(PolicyLoss):
    """sg(clip(ratio)) · A · logp: clip the weight, never the gradient."""

    is_plain_on_policy = True

    def objective(self, batch: TokenBatch) -> Tensor:
        """sg(clip(ratio)) · A · logp."""
        return clip(batch.ratios().detach(), self.settings) * batch.advantages * batch.logprobs

    def on_tinker(self) -> TinkerLoss:
        """The same loss; its clip is the cap."""
        return TinkerLoss("cispo", clip_bounds(self.settings))
