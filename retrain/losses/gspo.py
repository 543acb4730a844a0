"""The `gspo` loss (Zheng et al. 2025, arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.losses import PolicyLoss, TinkerLoss
from retrain.losses.ratios import cap, clip_bounds, pessimistic

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.losses.batch import TokenBatch


class GSPO(PolicyLoss):
    """PPO with one ratio per sequence: the geometric mean of its tokens' ratios."""

    def objective(self, batch: TokenBatch) -> Tensor:
        """min(ratio · A, clip(ratio) · A) with the ratio of the sequence."""
        ratios = batch.per_token(cap(batch.sequence_ratios(), self.settings))
        return pessimistic(ratios, batch.advantages, self.settings)

    def on_tinker(self) -> TinkerLoss:
        """The same loss in its token-wise form, without a cap."""
        return TinkerLoss("gspo", clip_bounds(self.settings), caps_ratios=False)
