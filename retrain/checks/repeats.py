"""Detects completions that repeat another of their group more often than chance explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.errors import RolloutError
from retrain.types import Completion, Group

# Short completions often repeat and are not counted. Repeats beyond chance are an error at any length.
LONGER_THAN = 16
# Probability of one repeat, or of all repeats of a step, below which they are not chance.
BEYOND_CHANCE = 1e-9


@dataclass(frozen=True)
class Repeat:
    """A completion with the same tokens as an earlier one."""

    group: int
    index: int
    earlier: int
    tokens: int
    log_odds: float
    """Log-probability that one of the earlier completions is drawn again."""


def find_repeats(groups: Sequence[Group]) -> tuple[list[Repeat], float]:
    """Completions that repeat another, and the expected number of them."""
    found, expected = [], 0.0
    for at, group in enumerate(groups):
        first: dict[bytes, int] = {}
        for index, completion in enumerate(group.completions_G):
            written = _written(completion)
            if not written.any():
                continue
            # Each earlier completion is drawn again with its own probability.
            log_odds = math.log(max(1, index)) + float(completion.logprobs_T[written].sum(dtype=np.float64))
            expected += min(1.0, math.exp(min(0.0, log_odds)))
            earlier = first.setdefault(np.asarray(completion.token_ids_T, np.int64).tobytes(), index)
            if earlier != index:
                found.append(Repeat(at, index, earlier, int(written.sum()), min(0.0, log_odds)))
    return found, expected


def check_repeats(groups: Sequence[Group], has_probabilities: bool) -> int:
    """Count completions that repeat another; raises if chance does not explain them (only with `has_probabilities`)."""
    repeats, expected = find_repeats(groups)
    counted = sum(repeat.tokens > LONGER_THAN for repeat in repeats)
    if not repeats or not has_probabilities:
        return counted
    rows = sum(len(group.completions_G) for group in groups)
    worst = min(repeats, key=lambda repeat: repeat.log_odds)
    # P(at least k | expected) <= (e · expected / k)^k for k beyond what is expected (Chernoff, Poisson).
    count = len(repeats)
    log_all = count * (1 + math.log(max(expected, 1e-300) / count)) if count > expected else 0.0
    if min(worst.log_odds + math.log(rows), log_all) < math.log(BEYOND_CHANCE):
        tokens = len(groups[worst.group].completions_G[worst.index].token_ids_T)
        raise RolloutError(
            f"completion {worst.index} of group {worst.group} repeats completion {worst.earlier}, all {tokens} tokens "
            f"of it, where the odds are 1 to 1e{-worst.log_odds / math.log(10):.0f} ({count} such repeats in this "
            "step). The sampler sent it twice, or used one seed for two requests. Nothing was trained on this step.  "
            "Try: check what lies between the server and the trainer, restart the server, and resume"
        )
    return counted


def _written(completion: Completion) -> np.ndarray:
    sampled = completion.sampled_T
    return np.ones(len(completion.token_ids_T), bool) if sampled is None else np.asarray(sampled, bool)
