"""The loss of a micro-batch: the policy-gradient objective of `retrain.losses`, and the KL penalty."""

from __future__ import annotations

from torch import Tensor

from retrain.losses import PolicyLoss
from retrain.losses.batch import TokenBatch
from retrain.losses.ratios import MAX_LOG_RATIO


def summed_loss(batch: TokenBatch, loss: PolicyLoss, beta: float = 0.0) -> Tensor:
    """The negative objective plus `beta` times the KL estimate, summed with the weights of the loss's average."""
    objective = loss.objective(batch)
    if batch.reference_logprobs is not None:
        objective = objective - beta * divergence(batch.logprobs, batch.reference_logprobs)
    return -(objective * loss.average.weights(batch)).sum()


def divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1, d = log(reference / policy): its mean over samples of the policy is KL(policy || reference)."""
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
