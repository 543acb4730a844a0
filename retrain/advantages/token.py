"""Token transforms: how an episode advantage is shared out over the tokens of its completion.

All take flat arrays and a `Ragged` that says which tokens belong to which completion.
"""

from __future__ import annotations

import numpy as np

from retrain.advantages.ragged import Ragged, divide
from retrain.types import BoolArray, FloatArray, IntArray

SMALLEST_UNCERTAINTY = 1e-8
"""A completion whose mean uncertainty is not above this has nothing to weigh by: its tokens all weigh 1."""


def gtpo_weights(uncertainty: FloatArray, tokens: Ragged, beta: float, counts: IntArray | None = None) -> FloatArray:
    """`max(0, 1 + beta (H / mean(H) - 1))`, the mean over the completion: unsure tokens get more of the credit.

    GTPO, arXiv 2508.04349. `counts` is how many tokens of each completion the mean runs over, where not all do; the
    others must have uncertainty 0.
    """
    means = divide(tokens.sum(uncertainty), tokens.lengths if counts is None else counts)
    weighed = means > SMALLEST_UNCERTAINTY
    slopes = np.divide(beta, means, out=np.zeros(len(means)), where=weighed)
    weights = tokens.spread(slopes)
    weights *= uncertainty
    weights += 1.0 - beta if weighed.all() else tokens.spread(np.where(weighed, 1.0 - beta, 1.0))
    return np.maximum(weights, 0.0, out=weights)


def hicra_amplify(advantages: FloatArray, planning: BoolArray, alpha: float) -> FloatArray:
    """`A + alpha |A|` on planning tokens: praise grows, blame shrinks, and for `0 <= alpha < 1` no sign changes.

    HICRA, arXiv 2509.03646.
    """
    amplified = advantages.copy()
    chosen = advantages[planning]
    amplified[planning] = chosen + alpha * np.abs(chosen)
    return amplified


def sepa_pool(uncertainty: FloatArray, execution: BoolArray, tokens: Ragged, sepa_lambda: float) -> FloatArray:
    """Draw execution tokens towards their completion's mean: `lambda mean(H) + (1 - lambda) H`; others keep `H`.

    The completion's own mean does not move, so that planning tokens stand out more and more as lambda grows.
    """
    means = divide(tokens.sum(uncertainty * execution), tokens.count(execution))
    pooled = tokens.spread(sepa_lambda * means)
    pooled += (1.0 - sepa_lambda) * uncertainty
    return np.where(execution, pooled, uncertainty)
