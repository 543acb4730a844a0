"""How unsure the model was at each token, from what the engine returned with it.

Arrays are flat: all tokens of a batch, end to end. A custom kind is a function of an `UncertaintyContext`, or an
`Uncertainty` when it has to have true entropies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrain.types import FloatArray

LARGEST_SURPRISAL = 50.0
"""Cap in nats (a probability of 2e-22), so that one impossible token does not take over its completion's mean."""


@dataclass(frozen=True)
class UncertaintyContext:
    """What is known of each token: its log-prob, and the entropy of its distribution where the engine returns it."""

    logprobs: FloatArray
    entropies: FloatArray | None = None


UncertaintyFn = Callable[[UncertaintyContext], FloatArray]
"""Flat arrays in, one number a token out."""


@dataclass(frozen=True)
class Uncertainty:
    """One kind of uncertainty. `needs_entropies` lets an engine that has none be refused before training."""

    name: str
    compute: UncertaintyFn
    needs_entropies: bool = False

    def __call__(self, context: UncertaintyContext) -> FloatArray:
        """The uncertainty of every token."""
        return self.compute(context)


def _surprisal(context: UncertaintyContext) -> FloatArray:
    # Rounding can leave a log-prob a hair above 0; a negative surprisal would upset the means taken of it.
    surprisals = np.negative(context.logprobs)
    np.maximum(surprisals, 0.0, out=surprisals)
    return np.minimum(surprisals, LARGEST_SURPRISAL, out=surprisals)


def _predictive_variance(context: UncertaintyContext) -> FloatArray:
    probabilities = np.exp(np.minimum(context.logprobs, 0.0))
    return probabilities * (1.0 - probabilities)


def _shannon_entropy(context: UncertaintyContext) -> FloatArray:
    if context.entropies is None:
        raise ValueError(
            "shannon_entropy needs the true entropy of every token, and these completions came without. "
            'Try: uncertainty_kind = "surprisal", or an engine that returns entropies.'
        )
    return np.maximum(context.entropies, 0.0)


surprisal = Uncertainty("surprisal", _surprisal)
"""`-logprob` of the sampled token, in nats, capped at 50."""

predictive_variance = Uncertainty("predictive_variance", _predictive_variance)
"""`p (1 - p)` of the sampled token: highest where the model was undecided, low where it was sure either way."""

shannon_entropy = Uncertainty("shannon_entropy", _shannon_entropy, needs_entropies=True)
"""Entropy of the whole distribution, in nats, from engines that return it."""
