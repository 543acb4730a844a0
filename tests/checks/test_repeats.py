"""Completions that repeat another of their group, by chance or not."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.checks.repeats import check_repeats, find_repeats
from retrain.errors import RolloutError
from retrain.types import Completion, Example, Group


def group(answers: list[list[int]], logprob: float) -> Group:
    completions = tuple(
        Completion(np.array(ids), np.full(len(ids), logprob, np.float32), "", "length") for ids in answers
    )
    return Group(Example("q", "a"), np.arange(3), completions)


LONG, OTHER = list(range(20)), list(range(20, 40))


def test_a_repeat_of_an_unlikely_completion_stops_the_run() -> None:
    with pytest.raises(RolloutError, match=r"completion 2 of group 0 repeats completion 0, all 20 tokens.*1 to 1e17"):
        # 20 tokens of -2 are e^-40, twice that for two completions before it: 10^-17.
        check_repeats([group([LONG, OTHER, LONG], -2.0)], has_probabilities=True)


def test_a_repeat_of_a_likely_completion_is_counted() -> None:
    assert check_repeats([group([LONG, OTHER, LONG], -0.1)], has_probabilities=True) == 1


def test_many_repeats_that_are_each_possible_are_no_chance_together() -> None:
    # Each is e^-10 or 4.5e-5; ten of them in ten groups of two.
    groups = [group([LONG, LONG], -0.5) for _ in range(10)]
    assert check_repeats(groups[:1], has_probabilities=True) == 1
    with pytest.raises(RolloutError, match="10 such repeats"):
        check_repeats(groups, has_probabilities=True)


def test_short_completions_may_repeat_within_chance_and_are_not_counted() -> None:
    assert check_repeats([group([LONG[:16], LONG[:16]], -0.5)], has_probabilities=True) == 0
    with pytest.raises(RolloutError, match="all 12 tokens"):
        check_repeats([group([LONG[:12], LONG[:12]], -5.0)], has_probabilities=True)


def test_without_odds_repeats_are_only_counted() -> None:
    assert check_repeats([group([LONG, LONG], -5.0)], has_probabilities=False) == 1


def test_the_same_answer_in_two_groups_is_no_repeat() -> None:
    found, expected = find_repeats([group([LONG], -5.0), group([LONG], -5.0)])
    assert found == []
    assert expected < 1e-40
