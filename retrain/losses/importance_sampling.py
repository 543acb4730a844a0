"""The `importance_sampling` loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.losses import PolicyLoss, TinkerLoss
from retrain.losses.ratios import cap

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.losses.batch import TokenBatch


class ImportanceSampling(PolicyLoss):
    """ratio · A."""

    is_plain_on_policy = True

    def objective(self, batch: TokenBatch) -> Tensor:
        """ratio · A, with the ratio capped."""
        return cap(batch.ratios(), self.settings) * batch.advantages

    def on_tinker(self) -> TinkerLoss:
        """The service's loss. With a cap, it is cispo: same gradient, sg(min(ratio, cap)) · A · ∇logp, other values."""
        if not self.settings.ratio_cap:
            return TinkerLoss("importance_sampling")
        return TinkerLoss("cispo", (0.0, self.settings.ratio_cap), same_value=False)
