"""The level of a test that is repeated after every seed, so that a campaign may stop early."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from retrain.config.tables.run import FIRST_LOOK

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Looks:
    """The design of a sequential test: a look after the fifth and each later seed, all at the same level."""

    max_seeds: int
    comparisons: int
    """Conditions that are tested against the baseline."""
    decided: frozenset[str] = frozenset()
    """Conditions that an earlier look decided, which is final."""

    def level(self, alpha: float) -> float:
        """The level of one look of one condition, such that all together have a false positive rate of alpha."""
        return sequential_level(self.max_seeds, alpha / self.comparisons)

    def adjust(self, p_value: float) -> float:
        """The probability that any look at any condition gives a smaller p-value without an effect."""
        return min(1.0, self.comparisons * float(np.mean(_smallest_p_values(self.max_seeds) <= p_value)))


@lru_cache
def sequential_level(max_seeds: int, alpha: float) -> float:
    """The level of each look: the alpha-quantile of the smallest p-value of a sequence of t-tests under no effect."""
    return float(np.quantile(_smallest_p_values(max_seeds), alpha)) if max_seeds >= FIRST_LOOK else 0.0


@lru_cache
def _smallest_p_values(max_seeds: int) -> Floats:
    """The smallest p-value of all looks under no effect, simulated.

    Its distribution does not depend on the spread of the differences, so one simulation serves all data.
    """
    draws = np.random.default_rng(0).standard_normal((100_000, max_seeds))
    counts = np.arange(1, max_seeds + 1)
    sums, squares = draws.cumsum(axis=1), (draws**2).cumsum(axis=1)
    variances = (squares - sums**2 / counts)[:, FIRST_LOOK - 1 :] / (counts[FIRST_LOOK - 1 :] - 1)
    scores = np.abs(sums[:, FIRST_LOOK - 1 :]) / np.sqrt(variances * counts[FIRST_LOOK - 1 :])
    result: Floats = (2 * stats.t.sf(scores, counts[FIRST_LOOK - 1 :] - 1)).min(axis=1)
    return result
