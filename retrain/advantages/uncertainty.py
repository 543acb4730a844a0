"""Uncertainty of the model at each token.

Arrays are flat: all tokens of a batch. A custom kind is a function of an `UncertaintyContext`, or an `Uncertainty` if
it needs true entropies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrain.plugins import REGISTRIES
from retrain.types import FloatArray

MAX_SURPRISAL = 50.0
"""Cap in nats (a probability of 2e-22), so that one improbable token does not dominate its completion's mean."""


@dataclass(frozen=True)
class UncertaintyContext:
    """Log-prob of each token, and the entropy of its distribution if the engine returns it."""

    logprobs: FloatArray
    entropies: FloatArray | None = None


UncertaintyFn = Callable[[UncertaintyContext], FloatArray]
"""Flat arrays in, one value per token out."""


@dataclass(frozen=True)
class Uncertainty:
    """A kind of uncertainty. `needs_entropies`: engines without entropies are rejected before training."""

    name: str
    compute: UncertaintyFn
    needs_entropies: bool = False

    def __call__(self, context: UncertaintyContext) -> FloatArray:
        """The uncertainty of every token."""
        return self.compute(context)


def needs_entropies(builtin: str) -> bool:
    """Whether a built-in kind needs true entropies."""
    kind = REGISTRIES["uncertainty"].load(builtin)
    assert isinstance(kind, Uncertainty)
    return kind.needs_entropies


def _surprisal(context: UncertaintyContext) -> FloatArray:
    # Rounding can lift a log-prob slightly above 0; a negative surprisal would distort means.
    surprisals = np.negative(context.logprobs)
    np.maximum(surprisals, 0.0, out=surprisals)
    return np.minimum(surprisals, MAX_SURPRISAL, out=surprisals)


def _predictive_variance(context: UncertaintyContext) -> FloatArray:
    probabilities = np.exp(np.minimum(context.logprobs, 0.0))
    return probabilities * (1.0 - probabilities)


def _shannon_entropy(context: UncertaintyContext) -> FloatArray:
    if context.entropies is None:
        raise ValueError(
            "shannon_entropy needs the true entropy of every token, and these completions have none. "
            'Try: uncertainty_kind = "surprisal", or an engine that returns entropies.'
        )
    return np.maximum(context.entropies, 0.0)


surprisal = Uncertainty("surprisal", _surprisal)
"""`-logprob` of the sampled token, in nats, capped at 50."""

predictive_variance = Uncertainty("predictive_variance", _predictive_variance)
"""`p (1 - p)` of the sampled token: highest where the model was undecided."""

shannon_entropy = Uncertainty("shannon_entropy", _shannon_entropy, needs_entropies=True)
"""Entropy of the whole distribution, in nats, from engines that return it."""
