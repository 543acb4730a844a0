"""The tokens that a loss is computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retrain.losses.ratios import MAX_LOG_RATIO
from retrain.modeling.determinism import gather_rows, sum_by_row


@dataclass(frozen=True)
class TokenBatch:
    """Completion tokens of several rows, concatenated."""

    logprobs: Tensor
    """Under the current policy; carries the gradient."""
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    """1 on tokens that take part, else 0."""
    row: Tensor
    """The row that each token belongs to."""
    rows: int
    reference_logprobs: Tensor | None = None
    """Under the reference policy, if there is a KL penalty."""

    def ratios(self) -> Tensor:
        """policy / sampler, per token."""
        return (self.logprobs - self.sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def sequence_ratios(self) -> Tensor:
        """The geometric mean of the ratios of each row, per row."""
        differences = (self.logprobs - self.sampled_logprobs) * self.mask
        means = self.row_sums(differences) / self.row_counts()
        return means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum values per token to values per row."""
        return sum_by_row(values[:, None], self.row, self.rows)[:, 0]

    def row_counts(self) -> Tensor:
        """Tokens of each row that take part, at least 1."""
        return self.row_sums(self.mask).clamp(min=1)

    def per_token(self, values: Tensor) -> Tensor:
        """Expand values per row to the tokens of each row."""
        return gather_rows(values[:, None], self.row)[:, 0]
