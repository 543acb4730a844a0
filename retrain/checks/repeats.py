"""Completions that repeat another of their group: by chance where they are likely, else somebody sent one twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.errors import RolloutError
from retrain.types import Completion, Group

# Short answers repeat all the time; longer ones are counted. What is beyond chance is said of any length.
LONGER_THAN = 16
# Odds of one repeat, and of all of a step's together, beyond which they are no chance.
BEYOND_CHANCE = 1e-9


@dataclass(frozen=True)
class Repeat:
    """One completion that has the tokens of an earlier one."""

    group: int
    index: int
    earlier: int
    tokens: int
    log_odds: float
    """Logarithm of the chance that one of the completions before it was drawn again."""


def find_repeats(groups: Sequence[Group]) -> tuple[list[Repeat], float]:
    """Completions that repeat another, and how many of them chance lets one expect."""
    found, expected = [], 0.0
    for at, group in enumerate(groups):
        first: dict[bytes, int] = {}
        for index, completion in enumerate(group.completions_G):
            written = _written(completion)
            if not written.any():
                continue
            # Each of those before it is drawn again with the probability that it was drawn with.
            log_odds = math.log(max(1, index)) + float(completion.logprobs_T[written].sum(dtype=np.float64))
            expected += min(1.0, math.exp(min(0.0, log_odds)))
            earlier = first.setdefault(np.asarray(completion.token_ids_T, np.int64).tobytes(), index)
            if earlier != index:
                found.append(Repeat(at, index, earlier, int(written.sum()), min(0.0, log_odds)))
    return found, expected


def refuse_repeats(groups: Sequence[Group], knows_odds: bool) -> int:
    """How many completions repeat another; raises where that is no chance. Without odds they are only counted."""
    repeats, expected = find_repeats(groups)
    counted = sum(repeat.tokens > LONGER_THAN for repeat in repeats)
    if not repeats or not knows_odds:
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
            "step). Whoever samples sent it twice, or gave two requests one seed. Nothing was trained on this step.  "
            "Try: see what stands between the server and the trainer, restart the server, and resume"
        )
    return counted


def _written(completion: Completion) -> np.ndarray:
    sampled = completion.sampled_T
    return np.ones(len(completion.token_ids_T), bool) if sampled is None else np.asarray(sampled, bool)
