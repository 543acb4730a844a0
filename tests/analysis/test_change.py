from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from retrain.analysis.change import comparable, noise_between, paired_change


def evaluation(correct: list[int], counted: list[int]) -> dict[str, object]:
    return {"step": 0, "correct": correct, "counted": counted}


@pytest.mark.parametrize("problems", [2, 3, 5, 6, 7, 20, 300])
def test_the_interval_is_that_of_the_paired_t_test(problems: int) -> None:
    rng = np.random.default_rng(problems)
    before, after, samples = rng.integers(2, 7, problems), rng.integers(3, 8, problems), [10_000] * problems
    found = paired_change(evaluation((100 * before).tolist(), samples), evaluation((100 * after).tolist(), samples))
    expected = stats.ttest_rel(after / 100, before / 100).confidence_interval()
    assert found is not None
    assert (found.difference, found.problems) == (pytest.approx((after - before).mean() / 100), problems)
    half = (expected.high - expected.low) / 2
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01 * half)


def test_pass_at_k_of_two_evaluations() -> None:
    # One of two of four samples is right with probability 1 - C(3, 2) / C(4, 2) = 1/2, 5/6 and 1 for 1, 2 and 3.
    found = paired_change(evaluation([1, 2, 0], [4, 4, 4]), evaluation([3, 2, 0], [4, 4, 4]), k=2)
    assert found is not None
    assert (found.before, found.after) == pytest.approx(((1 / 2 + 5 / 6) / 3, (1 + 5 / 6) / 3))


def test_a_difference_of_two_problems_by_hand() -> None:
    # Differences 1/4 and 1/2: mean 3/8, standard error 1/8, and 12.706 standard errors reach beyond a rate.
    found = paired_change(evaluation([0, 1], [4, 4]), evaluation([1, 3], [4, 4]))
    assert found is not None
    assert (found.difference, found.low, found.high, found.is_noise) == (0.375, -1.0, 1.0, True)


def test_problems_that_one_of_the_evaluations_could_not_score_are_left_out() -> None:
    found = paired_change(evaluation([1, 0, 2], [4, 0, 4]), evaluation([2, 4, 3], [4, 4, 4]))
    assert found is not None
    assert (found.difference, found.problems) == (0.25, 2)


def test_a_few_problems_that_change_alike_may_still_be_noise() -> None:
    for problems, is_noise in ((2, True), (3, True), (8, False)):
        found = paired_change(evaluation([0] * problems, [1] * problems), evaluation([1] * problems, [1] * problems))
        assert found is not None and found.is_noise == is_noise
        assert (found.before, found.after, found.high) == (0.0, 1.0, 1.0) and found.low < 0.9
    same = paired_change(evaluation([0] * 4, [1] * 4), evaluation([0] * 4, [1] * 4))
    assert same is not None and same.is_noise
    assert same.low == -same.high < -0.1


def test_rates_are_those_of_the_problems_in_common() -> None:
    first, last = [1] * 10 + [0] * 10, [0] * 10 + [1] * 4 + [0] * 6
    found = paired_change(evaluation(first, [1] * 20), evaluation(last, [0] * 10 + [1] * 10))
    assert found is not None
    assert (found.before, found.after, found.problems) == (0.0, 0.4, 10)


@pytest.mark.parametrize(
    "first",
    [
        {"step": 0, "eval_pass_at_1": 0.5},
        {"step": 0, "correct": None, "counted": None},
        evaluation([1, 1], [4, 4]),
        evaluation([1, 0, 0], [4, 0, 0]),
    ],
)
def test_evaluations_without_problems_in_common_cannot_be_paired(first: dict[str, object]) -> None:
    assert paired_change(first, evaluation([2, 3, 4], [4, 4, 4])) is None


def test_noise_between_two_means_is_welchs_interval() -> None:
    # Variances 1 and 4, so an error of sqrt(5 / 3) with 25 / (1 + 16) * 2 = 2.9 degrees of freedom, rounded down.
    assert noise_between([0.0, 1.0, 2.0], [0.0, 2.0, 4.0]) == pytest.approx(4.3027 * math.sqrt(5 / 3))
    assert noise_between([1.0, 1.0], [2.0, 2.0]) == 0.0


def test_only_evaluations_of_the_same_problems_and_sampling_are_comparable() -> None:
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0}
    setups = [("a", drawn), ("b", drawn), ("a", greedy), ("a", drawn)]
    rows = [{"step": step, "problems": p, "sampling": s} for step, (p, s) in enumerate(setups)]
    assert [row["step"] for row in comparable(rows)] == [0, 3]
    assert comparable([]) == []
    older = [{"step": 0}, {"step": 1}]  # of versions that did not store them
    assert len(comparable(older)) == 2
    assert [row["step"] for row in comparable([*older, *rows])] == [0, 1, 0, 3]
