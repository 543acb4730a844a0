"""Episode advantages: one number a completion, from the rewards of its group.

An advantage is any `(rewards_G) -> advantages_G`; a custom one also gets `[algorithm.advantage_params]` as keywords.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from retrain.errors import ConfigError
from retrain.types import FloatArray

AdvantageFn = Callable[[FloatArray], FloatArray]

SMALLEST_MEAN = 1e-6
"""Below this mean reward maxrl has nothing to divide by: nobody in the group was right."""

SMALLEST_SPREAD = 1e-4
"""Added to the spread of a group's rewards, so that nearly equal ones are not blown up."""


def grpo(rewards_G: FloatArray) -> FloatArray:
    """`r - mean(r)`: centred on the group, as GRPO (arXiv 2402.03300), without the division by the spread."""
    return np.subtract(rewards_G, float(rewards_G.mean()))


def grpo_scaled(rewards_G: FloatArray) -> FloatArray:
    """`(r - mean(r)) / (std(r) + 1e-4)`: GRPO as its paper has it (arXiv 2402.03300), with the sample spread."""
    if len(rewards_G) < 2:
        return np.zeros(len(rewards_G))
    return grpo(rewards_G) / (float(rewards_G.std(ddof=1)) + SMALLEST_SPREAD)


def maxrl(rewards_G: FloatArray) -> FloatArray:
    """`(r - mean(r)) / (mean(r) + 1e-6)`: the rarer a right answer, the more it weighs; zero when nobody was right.

    MaxRL, arXiv 2602.02710. Rewards from 0 up, less the same 1e-6 for rounding, keep the advantages of G completions
    between -1 and G - 1. A negative one lets the mean vanish or change its sign, so it is an error.
    """
    lowest = float(rewards_G.min(initial=0.0))
    if lowest < -SMALLEST_MEAN:
        raise ConfigError(
            f'[algorithm] advantage_mode = "maxrl" divides by the mean reward, so rewards must be at least 0, and one '
            f'is {lowest:g}.  Try: advantage_mode = "grpo", or add {-lowest:g} to every reward'
        )
    mean = float(rewards_G.mean())
    if mean <= SMALLEST_MEAN:
        return np.zeros(len(rewards_G))
    return np.subtract(rewards_G, mean) / (mean + SMALLEST_MEAN)
