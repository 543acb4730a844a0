"""A Learner that is one of several: its gradients are summed with the others' before the optimiser moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from retrain.backends.local.learner import Learner, Totals
from retrain.checks.agreement import Agreement, Finding, Gaps
from retrain.config import TrainConfig
from retrain.distributed.sums import agree_on, sum_gradients
from retrain.modeling.policy import Policy


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

    def judge(self, agreement: Agreement, own: Gaps, looked_at: Gaps | None, staleness: int) -> tuple[Finding, slice]:
        """Rank 0, which alone may know the engine's precision, judges the rows of all; the others do as it finds."""
        gaps, part = self._gather_gaps(own)
        verdict = torch.zeros(len(gaps.tokens) + 1, dtype=torch.int32, device=self.policy.device)
        finding = Finding(gaps, np.zeros(len(gaps.tokens), bool), len(gaps.tokens))
        if dist.get_rank() == 0:
            finding = agreement.judge(gaps, looked_at, staleness)
            verdict[:-1] = torch.from_numpy(finding.off[: finding.trained]).to(verdict)
            verdict[-1] = int(finding.refused)
        dist.broadcast(verdict, src=0)
        if dist.get_rank() != 0:
            off = verdict[:-1].bool().cpu().numpy()
            finding = Finding(gaps, off, len(off), shift=float(verdict[-1]))
        return finding, part

    def _gather_gaps(self, own: Gaps) -> tuple[Gaps, slice]:
        """The gaps of all ranks, one rank's after another's, and where this one's are."""
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self.policy.device)
        counts[dist.get_rank()] = len(own.tokens)
        dist.all_reduce(counts)
        edges = np.concatenate([[0], counts.cumsum(0).cpu().numpy()])
        part = slice(int(edges[dist.get_rank()]), int(edges[dist.get_rank() + 1]))
        table = torch.zeros(int(edges[-1]), 5, dtype=torch.float64, device=self.policy.device)
        table[part] = torch.from_numpy(own.table).to(table)
        dist.all_reduce(table)
        return Gaps.from_table(table.cpu().numpy()), part
