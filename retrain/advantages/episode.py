"""Episode advantages: one per completion, from the rewards of its group.

An advantage is any `(rewards_G) -> advantages_G`; a custom one also gets `[algorithm.advantage_params]` as keywords.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from retrain.errors import ConfigError
from retrain.types import FloatArray

AdvantageFn = Callable[[FloatArray], FloatArray]

MIN_MEAN = 1e-6
"""Minimum mean reward of a group for maxrl; below it no completion was right."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, so that nearly equal rewards are not amplified."""


def grpo(rewards_G: FloatArray) -> FloatArray:
    """`r - mean(r)`: centered on the group, as GRPO (arXiv 2402.03300), without dividing by the standard deviation."""
    return np.subtract(rewards_G, float(rewards_G.mean()))


def grpo_scaled(rewards_G: FloatArray) -> FloatArray:
    """`(r - mean(r)) / (std(r) + 1e-4)`: GRPO (arXiv 2402.03300) with the sample standard deviation."""
    if len(rewards_G) < 2:
        return np.zeros(len(rewards_G))
    return grpo(rewards_G) / (float(rewards_G.std(ddof=1)) + STD_EPSILON)


def maxrl(rewards_G: FloatArray) -> FloatArray:
    """`(r - mean(r)) / (mean(r) + 1e-6)`: rare right answers get more weight; zero if none was right.

    MaxRL, arXiv 2602.02710. Non-negative rewards, with a tolerance of 1e-6, keep the advantages of G completions
    between -1 and G - 1. A negative reward could make the mean zero or negative and is an error.
    """
    lowest = float(rewards_G.min(initial=0.0))
    if lowest < -MIN_MEAN:
        raise ConfigError(
            f'[algorithm] advantage_mode = "maxrl" divides by the mean reward, so rewards must be at least 0, and one '
            f'is {lowest:g}.  Try: advantage_mode = "grpo", or add a constant to every reward, so that none is below 0'
        )
    mean = float(rewards_G.mean())
    if mean <= MIN_MEAN:
        return np.zeros(len(rewards_G))
    return np.subtract(rewards_G, mean) / (mean + MIN_MEAN)
