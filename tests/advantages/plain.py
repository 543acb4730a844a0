"""The formulas of credit assignment, one token at a time: slow, obvious, and the judge of the fast version."""

from __future__ import annotations

import math


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def episode(rewards: list[float], mode: str) -> list[float]:
    average = mean(rewards)
    if mode == "grpo":
        return [reward - average for reward in rewards]
    if average <= 1e-6:
        return [0.0 for _ in rewards]
    return [(reward - average) / (average + 1e-6) for reward in rewards]


def uncertainty(logprob: float, entropy: float, kind: str) -> float:
    if kind == "surprisal":
        return min(max(-logprob, 0.0), 50.0)
    if kind == "predictive_variance":
        probability = math.exp(min(logprob, 0.0))
        return probability * (1.0 - probability)
    return entropy


def tokens(
    advantage: float,
    uncertainties: list[float],
    planning: list[bool],
    sampled: list[bool],
    transform: str,
    sepa_lambda: float,
    beta: float,
    alpha: float,
) -> list[float]:
    """Token advantages of one completion."""
    pooled = list(uncertainties)
    if transform == "gtpo_sepa":
        execution = [
            value for value, plan, ours in zip(uncertainties, planning, sampled, strict=True) if ours and not plan
        ]
        pool = mean(execution)
        pooled = [
            value if plan else sepa_lambda * pool + (1.0 - sepa_lambda) * value
            for value, plan in zip(uncertainties, planning, strict=True)
        ]
    average = mean([value for value, ours in zip(pooled, sampled, strict=True) if ours])
    earned = []
    for value, plan, ours in zip(pooled, planning, sampled, strict=True):
        weight = 1.0
        if transform != "none" and average > 1e-8:
            weight = max(0.0, 1.0 + beta * (value / average - 1.0))
        token = advantage * weight
        if transform == "gtpo_hicra" and plan:
            token += alpha * abs(token)
        earned.append(token if ours else 0.0)
    return earned
