"""The loss of a micro-batch: the policy-gradient objective of `retrain.losses`, and the KL penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from retrain.errors import PluginError, blaming
from retrain.losses import PolicyLoss
from retrain.losses.batch import TokenBatch
from retrain.losses.ratios import MAX_LOG_RATIO
from retrain.modeling.determinism import lacks_deterministic_kernel


def summed_loss(batch: TokenBatch, loss: PolicyLoss, beta: float = 0.0) -> Tensor:
    """The negative objective plus `beta` times the KL estimate, summed with the weights of the loss's average."""
    objective = _checked_objective(batch, loss)
    if batch.reference_logprobs is not None:
        objective = objective - beta * divergence(batch.logprobs, batch.reference_logprobs)
    return -(objective * loss.average.weights(batch)).sum()


def _checked_objective(batch: TokenBatch, loss: PolicyLoss) -> Tensor:
    name = f"loss {loss.settings.type!r}"
    with blaming(name, "in objective", _is_for_learner):
        objective = loss.objective(batch)
    tokens = batch.logprobs.shape
    if not isinstance(objective, Tensor) or objective.shape != tokens:
        # A number would be broadcast, and count once for every token.
        found = f"a tensor of shape {tuple(objective.shape)}" if isinstance(objective, Tensor) else repr(objective)
        raise PluginError(f"{name} returned {found} for {tokens[0]} tokens; it must return one number per token.")
    if not objective.is_floating_point() or objective.device != batch.logprobs.device:
        kind = f"{str(objective.dtype).removeprefix('torch.')} values on {objective.device}"
        raise PluginError(f"{name} returned {kind}; they must be floating-point values on {batch.logprobs.device}.")
    if batch.logprobs.requires_grad and not objective.requires_grad:
        # Beside a KL term, training would go on without it.
        raise PluginError(f"{name} returned values without a gradient.  Try: do not detach batch.logprobs")
    return objective


def _is_for_learner(error: BaseException) -> bool:
    """Whether the learner retries after this error, whoever raised it."""
    return isinstance(error, torch.OutOfMemoryError) or lacks_deterministic_kernel(error)


def divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1, d = log(reference / policy): its mean over samples of the policy is KL(policy || reference)."""
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
