"""A Learner that is one of several: its gradients are summed with the others' before the optimiser moves."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from retrain.backends.local.learner import Learner, Totals
from retrain.backends.local.model import Policy
from retrain.config import TrainConfig
from retrain.distributed.sums import agree_on, sum_gradients


class RankedLearner(Learner):
    """Data parallelism: the whole model on every rank, each with a share of the datums."""

    is_whole = True
    """Whether this rank alone holds all that a checkpoint needs."""

    def __init__(self, policy: Policy, config: TrainConfig, say: Callable[[str], None]) -> None:
        super().__init__(policy, config, say)
        agree_on([master.data for master in self.common()])
        self.optimizer.round()

    def common(self) -> list[nn.Parameter]:
        """Masters that every rank holds alike, and whose gradients must be summed."""
        return self.optimizer.masters

    def whole_policy(self) -> Policy | None:
        """The policy to sample from and to save, where this rank has it."""
        return self.policy

    def share(self, totals: Totals) -> None:
        """Add gradients and totals up over the ranks."""
        sum_gradients(self.common())
        dist.all_reduce(totals.sums)
        dist.all_reduce(totals.largest, dist.ReduceOp.MAX)
        totals.has_reference = self.reference is not None
