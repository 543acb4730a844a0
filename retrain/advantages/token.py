"""Token transforms: distribute an episode advantage over the tokens of its completion.

All take flat arrays and a `Ragged` that maps tokens to completions.
"""

from __future__ import annotations

import numpy as np

from retrain.advantages.ragged import Ragged, divide
from retrain.types import BoolArray, FloatArray, IntArray

MIN_UNCERTAINTY = 1e-8
"""Completions with a lower mean uncertainty get weights of 1."""


def gtpo_weights(uncertainty: FloatArray, tokens: Ragged, beta: float, counts: IntArray | None = None) -> FloatArray:
    """`max(0, 1 + beta (H / mean(H) - 1))`, the mean over the completion: uncertain tokens get more credit.

    GTPO, arXiv 2508.04349. `counts`: tokens per completion in the mean; the others must have uncertainty 0.
    """
    means = divide(tokens.sum(uncertainty), tokens.lengths if counts is None else counts)
    weighed = means > MIN_UNCERTAINTY
    slopes = np.divide(beta, means, out=np.zeros(len(means)), where=weighed)
    weights = tokens.repeat(slopes)
    weights *= uncertainty
    weights += 1.0 - beta if weighed.all() else tokens.repeat(np.where(weighed, 1.0 - beta, 1.0))
    return np.maximum(weights, 0.0, out=weights)


def hicra_amplify(advantages: FloatArray, planning: BoolArray, alpha: float) -> FloatArray:
    """`A + alpha |A|` on planning tokens: credit grows, blame shrinks; for `0 <= alpha < 1` no sign changes.

    HICRA, arXiv 2509.03646.
    """
    amplified = advantages.copy()
    chosen = advantages[planning]
    amplified[planning] = chosen + alpha * np.abs(chosen)
    return amplified


def sepa_pool(uncertainty: FloatArray, execution: BoolArray, tokens: Ragged, sepa_lambda: float) -> FloatArray:
    """Pull execution tokens towards their completion's mean: `lambda mean(H) + (1 - lambda) H`; others keep `H`.

    The mean does not change, so planning tokens stand out more as lambda grows.
    """
    means = divide(tokens.sum(uncertainty * execution), tokens.count(execution))
    pooled = tokens.repeat(sepa_lambda * means)
    pooled += (1.0 - sepa_lambda) * uncertainty
    return np.where(execution, pooled, uncertainty)
