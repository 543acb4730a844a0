"""Policy-gradient losses over packed completion tokens.

Each gives a per-token objective to be maximised and how it is averaged. A new loss is one function and one line in
`LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retrain.config.schema import Loss
from retrain.modeling.determinism import gather_rows, sum_by_row


@dataclass(frozen=True)
class TokenBatch:
    """Completion tokens of several rows, end to end. `row` says which row each belongs to."""

    logprobs: Tensor
    """Under the policy now; carries the gradient."""
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    """1 on tokens that take part, else 0."""
    row: Tensor
    rows: int
    reference_logprobs: Tensor | None = None
    """Under the reference policy, where there is a penalty for leaving it."""


# exp(20) is beyond any ratio that means something, and far from overflowing.
MAX_LOG_RATIO = 20.0

Objective = Callable[[TokenBatch, Loss], Tensor]


def importance_sampling(batch: TokenBatch, loss: Loss) -> Tensor:
    """ratio · A."""
    return _capped(_ratio(batch), loss) * batch.advantages


def ppo(batch: TokenBatch, loss: Loss) -> Tensor:
    """min(ratio · A, clip(ratio) · A) (Schulman et al. 2017, arXiv 1707.06347)."""
    ratio = _capped(_ratio(batch), loss)
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def cispo(batch: TokenBatch, loss: Loss) -> Tensor:
    """Clip the weight, never the gradient: sg(clip(ratio)) · A · logp (MiniMax-M1, arXiv 2506.13585)."""
    weight = _ratio(batch).detach().clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return weight * batch.advantages * batch.logprobs


def gspo(batch: TokenBatch, loss: Loss) -> Tensor:
    """One ratio a sequence, the geometric mean of its tokens', clipped as a whole (arXiv 2507.18071)."""
    difference = (batch.logprobs - batch.sampled_logprobs) * batch.mask
    means = _sums(batch, difference) / _counts(batch)
    ratio = _of_each_token(batch, _capped(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), loss))
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


LOSSES: dict[str, Objective] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    # Differs from ppo in its denominator alone: a constant, so that long answers are not discounted (arXiv 2503.20783).
    "dr_grpo": ppo,
    # Differs from ppo in its mean alone: over the tokens of each row, then over rows (arXiv 2402.03300).
    "grpo": ppo,
}


def denominator(loss: Loss, tokens: int, rows: int, max_tokens: int) -> float:
    """What the summed objective of a whole step is divided by."""
    if loss.type == "grpo":
        return float(max(rows, 1))
    return float(rows * max_tokens) if loss.type == "dr_grpo" else float(max(tokens, 1))


def summed_loss(batch: TokenBatch, loss: Loss, beta: float = 0.0) -> Tensor:
    """Minus the objective, and `beta` times the divergence from the reference, over the tokens that take part."""
    objective = LOSSES[loss.type](batch, loss)
    if batch.reference_logprobs is not None:
        objective = objective - beta * divergence(batch.logprobs, batch.reference_logprobs)
    return -(objective * _weights(batch, loss)).sum()


def _weights(batch: TokenBatch, loss: Loss) -> Tensor:
    """What each token counts for in the sum: 1 where it takes part, or its share of its row."""
    return batch.mask / _of_each_token(batch, _counts(batch)) if loss.type == "grpo" else batch.mask


def _counts(batch: TokenBatch) -> Tensor:
    """Tokens of each row that take part, or 1 where none does."""
    return _sums(batch, batch.mask).clamp(min=1)


def _sums(batch: TokenBatch, of_tokens: Tensor) -> Tensor:
    """Add up a value per token into one per row."""
    return sum_by_row(of_tokens[:, None], batch.row, batch.rows)[:, 0]


def _of_each_token(batch: TokenBatch, of_rows: Tensor) -> Tensor:
    """Hand a value per row to the row's tokens."""
    return gather_rows(of_rows[:, None], batch.row)[:, 0]


def divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1, d = log(reference / policy): on the policy's own samples its mean is KL(policy || reference)."""
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def _ratio(batch: TokenBatch) -> Tensor:
    return (batch.logprobs - batch.sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _capped(ratio: Tensor, loss: Loss) -> Tensor:
    """Truncated importance sampling: min(ratio, cap) in value; a capped token still has a gradient."""
    if not loss.ratio_cap:
        return ratio
    return ratio * (ratio.detach().clamp(max=loss.ratio_cap) / ratio.detach())
