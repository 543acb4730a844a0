"""Small groups for the tests of credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.types import Completion, Example, Group, Outcome, Score


def completion(
    logprobs: Sequence[float], *, entropies: Sequence[float] | None = None, sampled: Sequence[bool] | None = None
) -> Completion:
    return Completion(
        token_ids_T=np.arange(len(logprobs)),
        logprobs_T=np.array(logprobs, dtype=np.float64),
        text="",
        finish_reason="stop",
        entropies_T=None if entropies is None else np.array(entropies, dtype=np.float64),
        sampled_T=None if sampled is None else np.array(sampled, dtype=np.bool_),
    )


def group(completions: Sequence[Completion], scores: Sequence[float | Outcome]) -> Group:
    """A number is a reward (right from 1 on), a word an outcome without a value."""
    return Group(Example("question", "answer"), np.arange(3), tuple(completions), tuple(map(score, scores)))


def score(value: float | Outcome) -> Score:
    if isinstance(value, str):
        return Score(0.0, value)
    return Score(value, "right" if value >= 1.0 else "wrong")
