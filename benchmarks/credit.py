"""How fast is credit assignment, against the same formulas written token by token in plain Python?

    python benchmarks/credit.py

128 completions of 10,000 tokens through maxrl + gtpo_sepa on one core. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from retrain.advantages import CreditAssigner
from retrain.config.schema import Gtpo, TrainConfig
from retrain.types import BoolArray, Completion, Example, FloatArray, Group, Score

GROUPS, GROUP_SIZE, TOKENS = 8, 16, 10_000
SEPA_LAMBDA, BETA, PLANNING_SHARE = 0.5, 0.1, 0.1
MOST_SECONDS, LEAST_SPEEDUP = 0.1, 50.0

T = TypeVar("T")
U = TypeVar("U")


def make_batch(seed: int = 0) -> tuple[list[Group], list[list[BoolArray]]]:
    """Groups as an engine returns them: float32 log-probs and entropies, about a third of the answers right."""
    random = np.random.default_rng(seed)
    groups, masks_PG = [], []
    for _ in range(GROUPS):
        completions_G = tuple(
            Completion(
                token_ids_T=np.arange(TOKENS),
                logprobs_T=-random.exponential(0.5, TOKENS).astype(np.float32),
                text="",
                finish_reason="stop",
                entropies_T=random.exponential(0.5, TOKENS).astype(np.float32),
            )
            for _ in range(GROUP_SIZE)
        )
        right_G = [True, False, *(random.random(GROUP_SIZE - 2) < 1 / 3)]
        scores_G = tuple(Score(1.0, "right") if right else Score(0.0, "wrong") for right in right_G)
        groups.append(Group(Example("", ""), np.arange(10), completions_G, scores_G))
        masks_PG.append([random.random(TOKENS) < PLANNING_SHARE for _ in range(GROUP_SIZE)])
    return groups, masks_PG


def plain_group(rewards: list[float], logprobs_G: list[list[float]], masks_G: list[list[bool]]) -> list[list[float]]:
    """maxrl + gtpo_sepa of one group, one token at a time."""
    mean_reward = sum(rewards) / len(rewards)
    token_advantages = []
    for reward, logprobs, mask in zip(rewards, logprobs_G, masks_G, strict=True):
        advantage = (reward - mean_reward) / (mean_reward + 1e-6) if mean_reward > 1e-6 else 0.0
        uncertainties = [min(max(-logprob, 0.0), 50.0) for logprob in logprobs]
        execution = [value for value, planned in zip(uncertainties, mask, strict=True) if not planned]
        pool = sum(execution) / len(execution) if execution else 0.0
        pooled = [
            value if planned else SEPA_LAMBDA * pool + (1.0 - SEPA_LAMBDA) * value
            for value, planned in zip(uncertainties, mask, strict=True)
        ]
        mean = sum(pooled) / len(pooled)
        token_advantages.append([advantage * max(0.0, 1.0 + BETA * (value / mean - 1.0)) for value in pooled])
    return token_advantages


def plain_moments(groups: Sequence[Group], masks_PG: list[list[list[bool]]], planned: bool) -> tuple[float, float]:
    """Mean and variance of the uncertainty of planning (or execution) tokens, one token at a time."""
    values = [
        min(max(-logprob, 0.0), 50.0)
        for group, masks_G in zip(groups, masks_PG, strict=True)
        for completion, mask in zip(group.completions_G, masks_G, strict=True)
        for logprob, is_planned in zip(completion.logprobs_T.tolist(), mask, strict=True)
        if is_planned == planned
    ]
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


def plain_step(groups: Sequence[Group], masks_PG: list[list[list[bool]]]) -> list[list[list[float]]]:
    """What `CreditAssigner.assign` does, in plain Python: token advantages and the entropy statistics."""
    plain_moments(groups, masks_PG, planned=False)
    plain_moments(groups, masks_PG, planned=True)
    return [
        plain_group(
            [score.value for score in group.scores_G],
            [completion.logprobs_T.tolist() for completion in group.completions_G],
            masks_G,
        )
        for group, masks_G in zip(groups, masks_PG, strict=True)
    ]


def race(fast: Callable[[], T], slow: Callable[[], U], rounds: int = 4) -> tuple[float, T, float, U]:
    """The best time of either, taken in turns, so that a busy spell of the machine does not fall on one alone."""
    fast_times, slow_times = [], []
    for _ in range(rounds):
        for _ in range(8):
            seconds, quick = timed(fast)
            fast_times.append(seconds)
        seconds, plain = timed(slow)
        slow_times.append(seconds)
    return min(fast_times), quick, min(slow_times), plain


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """How long a call took, and what it returned."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def largest_difference(fast_PG: Sequence[Sequence[FloatArray]], slow_PG: list[list[list[float]]]) -> float:
    """How far the two versions are apart at the worst token."""
    return max(
        float(np.abs(fast - np.array(slow)).max())
        for fast_G, slow_G in zip(fast_PG, slow_PG, strict=True)
        for fast, slow in zip(fast_G, slow_G, strict=True)
    )


def main() -> int:
    """Measure, print one table, say whether the bounds hold."""
    groups, masks_PG = make_batch()
    mask_lists_PG = [[mask.tolist() for mask in masks_G] for masks_G in masks_PG]
    assigner = CreditAssigner(TrainConfig(gtpo=Gtpo(beta=BETA)))
    fast_s, credit, slow_s, plain = race(
        lambda: assigner.assign(groups, masks_PG, SEPA_LAMBDA), lambda: plain_step(groups, mask_lists_PG)
    )
    difference = largest_difference(credit.token_advantages_PG, plain)
    speedup = slow_s / fast_s
    count = GROUPS * GROUP_SIZE * TOKENS
    print(f"maxrl + gtpo_sepa, {GROUPS * GROUP_SIZE} completions x {TOKENS:,} tokens, one core, best run\n")
    print(f"{'version':<14}{'seconds':>10}{'M tokens/s':>12}")
    print(f"{'retrain':<14}{fast_s:>10.4f}{count / fast_s / 1e6:>12.1f}")
    print(f"{'plain Python':<14}{slow_s:>10.4f}{count / slow_s / 1e6:>12.2f}")
    bounds = [
        (f"at most {MOST_SECONDS} s", f"{fast_s:.4f} s", fast_s <= MOST_SECONDS),
        (f"at least {LEAST_SPEEDUP:.0f}x", f"{speedup:.1f}x", speedup >= LEAST_SPEEDUP),
        ("same numbers (1e-9)", f"{difference:.1e}", difference <= 1e-9),
    ]
    print()
    for bound, got, held in bounds:
        print(f"{bound:<22}{got:>10}  {'ok' if held else 'MISSED'}")
    return 0 if all(held for _, _, held in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
