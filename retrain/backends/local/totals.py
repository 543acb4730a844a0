"""Sums over the micro-batches of a step: the loss, ratios, divergences, and the log-prob gaps of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.loss import divergence
from retrain.checks.agreement import LogprobGaps
from retrain.losses.batch import TokenBatch
from retrain.modeling.determinism import sum_by_row
from retrain.types import Datum, StepMetrics


class Totals:
    """Sums over the micro-batches of a step, kept on the device so that no micro-batch is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        """Loss, ratios, KL from the sampler, KL from the reference, tokens."""
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self.has_reference = False
        self.rows: list[Tensor] = []
        """For each micro-batch, (rows, 3): tokens, the sum of |Δ| of log-probs, and the largest."""
        self.datums: Sequence[Datum] = ()
        """The datums of these rows."""

    @torch.no_grad()
    def add(self, loss: Tensor, batch: TokenBatch) -> None:
        """Add a micro-batch."""
        taken = batch.mask > 0
        chosen = (batch.logprobs - batch.sampled_logprobs).double().clamp(-20, 20)
        ratio = torch.where(taken, chosen.exp(), 0.0)
        # E_sampled[r - 1 - log r] estimates KL(sampled || trained) without bias and never below zero.
        kl_sampler = torch.where(taken, ratio - 1 - chosen, 0.0)
        kl_ref = torch.zeros_like(ratio)
        if batch.reference_logprobs is not None:
            self.has_reference = True
            kl_ref = torch.where(taken, divergence(batch.logprobs, batch.reference_logprobs).double(), 0.0)
        self.sums += torch.stack([loss.double(), ratio.sum(), kl_sampler.sum(), kl_ref.sum(), taken.sum()])
        self.largest = torch.maximum(self.largest, ratio.max())
        gap = torch.where(taken, chosen.abs().nan_to_num(0.0), 0.0)
        sums = sum_by_row(torch.stack([taken.double(), gap], 1), batch.row, batch.rows)
        largest = torch.zeros_like(sums[:, 0]).scatter_reduce_(0, batch.row, gap, "amax")
        self.rows.append(torch.cat([sums, largest[:, None]], 1))

    def join(self, other: Totals) -> None:
        """Add the sums and rows of another part of the same step."""
        self.sums += other.sums
        self.largest = torch.maximum(self.largest, other.largest)
        self.has_reference = self.has_reference or other.has_reference
        self.rows += other.rows
        self.datums = [*self.datums, *other.datums]

    @property
    def tokens(self) -> float:
        """Number of trained tokens."""
        return float(self.sums[4])

    def gaps(self) -> LogprobGaps:
        """Log-prob gaps between sampler and trainer, per row."""
        table = torch.cat(self.rows).cpu().numpy() if self.rows else np.zeros((0, 3))
        return LogprobGaps.of(self.datums, table)

    def metrics(self) -> StepMetrics:
        """Loss, means over tokens, and the largest ratio."""
        loss, ratios, kl_sampler, kl_ref, tokens = self.sums.tolist()
        tokens = max(tokens, 1.0)
        metrics: StepMetrics = {
            "loss": loss,
            "ratio_mean": ratios / tokens,
            "ratio_max": float(self.largest),
            "kl_sample_train": kl_sampler / tokens,
        }
        return metrics | ({"kl_ref": kl_ref / tokens} if self.has_reference else {})
