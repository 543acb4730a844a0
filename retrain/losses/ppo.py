"""The `ppo` loss (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.losses import PolicyLoss, TinkerLoss
from retrain.losses.ratios import cap, clip_bounds, pessimistic

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.losses.batch import TokenBatch


class PPO(PolicyLoss):
    """min(ratio · A, clip(ratio) · A)."""

    is_plain_on_policy = True

    def objective(self, batch: TokenBatch) -> Tensor:
        """min(ratio · A, clip(ratio) · A), with the ratio capped."""
        return pessimistic(cap(batch.ratios(), self.settings), batch.advantages, self.settings)

    def on_tinker(self) -> TinkerLoss | None:
        """The same loss, without a cap."""
        return TinkerLoss("ppo", clip_bounds(self.settings), caps_ratios=False)
