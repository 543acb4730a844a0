"""Data-parallel learner: gradients are all-reduced before the optimizer step.

They are summed in float32, in an order that depends only on the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from retrain.backends.local.learner import Learner
from retrain.backends.local.totals import Totals
from retrain.checks.agreement import Agreement, AgreementReport, LogprobGaps
from retrain.config import TrainConfig
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import foreach_copy_

# Elements per bucket: large enough to saturate the network, small compared with the model.
BUCKET = 1 << 25


class RankedLearner(Learner):
    """A replica of the model on every rank, each with a share of the datums."""

    is_replicated = True
    """Whether this rank holds everything that a checkpoint needs."""

    def __init__(self, policy: Policy, config: TrainConfig, log: Callable[[str], None]) -> None:
        super().__init__(policy, config, log)
        for master in self.replicated():
            dist.broadcast(master.data, src=0)
        self.optimizer.round()

    def replicated(self) -> list[nn.Parameter]:
        """Masters of replicated parameters, whose gradients are all-reduced."""
        return self.optimizer.masters

    def gathered_policy(self) -> Policy | None:
        """The full policy to sample from and to save; None if this rank has none."""
        return self.policy

    def share(self, totals: Totals) -> None:
        """All-reduce gradients and totals."""
        all_reduce_gradients(self.replicated())
        dist.all_reduce(totals.sums)
        dist.all_reduce(totals.largest, dist.ReduceOp.MAX)
        totals.has_reference = self.reference is not None

    def check_agreement(
        self, agreement: Agreement, own: LogprobGaps, checked: LogprobGaps | None, staleness: int
    ) -> tuple[AgreementReport, slice]:
        """Rank 0 checks the rows of all ranks and broadcasts the result; only it may know the engine's precision."""
        gaps, part = self._gather_gaps(own)
        verdict = torch.zeros(len(gaps.tokens) + 1, dtype=torch.int32, device=self.policy.device)
        report = AgreementReport(gaps, np.zeros(len(gaps.tokens), bool), len(gaps.tokens))
        if dist.get_rank() == 0:
            report = agreement.check(gaps, checked, staleness)
            verdict[:-1] = torch.from_numpy(report.mismatched[: report.trained]).to(verdict)
            verdict[-1] = int(report.rejected)
        dist.broadcast(verdict, src=0)
        if dist.get_rank() != 0:
            off = verdict[:-1].bool().cpu().numpy()
            report = AgreementReport(gaps, off, len(off), shift=float(verdict[-1]))
        return report, part

    def _gather_gaps(self, own: LogprobGaps) -> tuple[LogprobGaps, slice]:
        """The gaps of all ranks, concatenated, and the slice of this rank."""
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self.policy.device)
        counts[dist.get_rank()] = len(own.tokens)
        dist.all_reduce(counts)
        edges = np.concatenate([[0], counts.cumsum(0).cpu().numpy()])
        part = slice(int(edges[dist.get_rank()]), int(edges[dist.get_rank() + 1]))
        table = torch.zeros(int(edges[-1]), 5, dtype=torch.float64, device=self.policy.device)
        table[part] = torch.from_numpy(own.table).to(table)
        dist.all_reduce(table)
        return LogprobGaps.from_table(table.cpu().numpy()), part


def all_reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks; a gradient that no rank has stays None.

    The optimizer skips parameters without a gradient (an expert without tokens) and must do so on every rank.
    """
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    shared = [parameter for parameter, has in zip(parameters, present.tolist(), strict=True) if has]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in in_buckets([parameter.grad for parameter in shared if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def in_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors in buckets of up to `BUCKET` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
