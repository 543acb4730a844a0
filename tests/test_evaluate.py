from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.analysis.change import pass_at_k
from retrain.data.order import digest_of
from retrain.evaluate import Evaluation, Evaluator, rate_interval, wilson_interval
from retrain.inference_engine import InferenceEngine
from retrain.rollout import Failures, Rollouts
from retrain.types import Completion, Example, Group, Sampling, Score


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    answers = [index < correct for index in range(samples)]
    draws = list(itertools.combinations(answers, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_one_is_the_mean_over_problems() -> None:
    evaluation = Evaluation(correct=(1, 4, 0), counted=(4, 4, 2), k=2)
    assert evaluation.pass_at_1 == pytest.approx((0.25 + 1 + 0) / 3)
    assert evaluation.pass_at_k == pytest.approx((0.5 + 1 + 0) / 3)


def test_problems_whose_scoring_failed_do_not_count() -> None:
    evaluation = Evaluation(correct=(1, 0), counted=(1, 0), k=4)
    assert (evaluation.pass_at_1, evaluation.pass_at_k) == (1.0, 1.0)
    nothing = Evaluation(correct=(0,), counted=(0,), k=1)
    assert (nothing.pass_at_1, nothing.interval) == (0.0, (0.0, 1.0))
    rates = ("eval_pass_at_1", "eval_pass_at_k", "eval_ci_low", "eval_ci_high")
    assert [nothing.metrics()[name] for name in rates] == [None] * 4
    assert None not in evaluation.metrics().values()


def test_wilsons_interval_is_the_textbook_one_for_one_answer_per_problem() -> None:
    # 8 of 10: the published interval is 0.490 to 0.943.
    low, high = rate_interval([1.0] * 8 + [0.0] * 2, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)


def test_the_interval_never_leaves_zero_to_one_and_holds_the_mean() -> None:
    for right in range(13):
        low, high = rate_interval([1.0] * right + [0.0] * (12 - right), 12)
        assert 0.0 <= low <= right / 12 <= high <= 1.0
        assert high > low


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(2000):
        # 60 problems of unequal difficulty, four answers each.
        chances = rng.beta(2, 3, size=60)
        rates = rng.binomial(4, chances) / 4
        low, high = rate_interval(rates.tolist(), 240)
        covered.append(low <= 0.4 <= high)
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize("problems", [4, 8, 16, 32])
def test_few_problems_with_many_samples_are_covered_as_often(problems: int) -> None:
    rng = np.random.default_rng(problems)
    for a, b in ((0.5, 0.5), (2, 2), (1, 4)):
        rates_RP = rng.binomial(16, rng.beta(a, b, (2000, problems))) / 16
        found = [rate_interval(rates, 16 * problems) for rates in rates_RP.tolist()]
        covered = np.mean([low <= a / (a + b) <= high for low, high in found])
        assert 0.93 < covered < 0.98, (a, b)


def test_the_interval_is_between_those_of_single_and_of_independent_samples() -> None:
    # Rates of 0 or 1 only: 16 samples each say no more than one.
    assert rate_interval([1.0, 0.0, 1.0, 0.0], 64) == rate_interval([1.0, 0.0, 1.0, 0.0], 4)
    rng = np.random.default_rng(0)
    for rates in (rng.binomial(4, rng.beta(1, 1, (200, 6))) / 4).tolist():
        low, high = rate_interval(rates, 24)
        mean = sum(rates) / 6
        single, independent = wilson_interval(mean, 6), wilson_interval(mean, 24)
        assert 0.0 <= single[0] <= low <= independent[0] <= mean <= independent[1] <= high <= single[1] <= 1.0


def test_the_interval_is_never_narrower_than_that_of_independent_completions() -> None:
    # 9 of 16; four problems that happen to vary little are no better than that.
    evaluation = Evaluation(correct=(2, 2, 2, 3), counted=(4, 4, 4, 4), k=1)
    assert evaluation.interval == pytest.approx((0.3318, 0.7690), abs=1e-4)


def test_equal_rates_have_the_interval_of_as_many_single_samples() -> None:
    # The mean of ten thirds is not exactly a third.
    low, high = rate_interval([1 / 3] * 10, 30)
    assert low < 0.15 and high > 0.6
    assert rate_interval([0.25] * 10, 40) == pytest.approx((0.0809, 0.5578), abs=1e-4)


class CannedScorer:
    """Scores the way a table says."""

    def __init__(self, outcomes: Sequence[Sequence[str]]) -> None:
        self.outcomes = outcomes
        self.asked: list[Sampling] = []
        self.failures = Failures("Scoring", "completions", lambda line: None)

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        self.asked.append(sampling)
        groups = []
        for example, outcomes in zip(examples, self.outcomes, strict=True):
            completions = tuple(
                Completion(np.arange(2), np.zeros(2), f"answer {n}", "stop") for n in range(len(outcomes))
            )
            scores = tuple(Score(float(outcome == "right"), outcome) for outcome in outcomes)  # type: ignore[arg-type]
            groups.append(Group(example, np.arange(3), completions, scores))
        return Rollouts(groups, 0.0, 0.0)

    def reward_metrics(self) -> dict[str, int]:
        return {"judge_requests": 6}


def test_an_evaluation_counts_right_and_scored_answers_problem_by_problem() -> None:
    scorer = CannedScorer([["right", "wrong", "error"], ["wrong", "timeout", "wrong"]])
    examples = [Example("a", "1"), Example("b", "2")]
    evaluator = Evaluator(scorer, examples, Sampling(max_tokens=5, n=3, seed=9), every=10, k=3)  # type: ignore[arg-type]
    evaluation = evaluator.run(None)  # type: ignore[arg-type]
    assert (evaluation.correct, evaluation.counted, evaluation.errors) == ((1, 0), (2, 2), 2)
    sampling = {"max_tokens": 5, "n": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert evaluation.record(20) == {
        "step": 20,
        **evaluation.metrics(),
        "k": 3,
        "problems": digest_of(examples),
        "sampling": sampling | {"repetition_penalty": 1.0},
        "correct": [1, 0],
        "counted": [2, 2],
    }
    assert evaluation.metrics()["eval_judge_requests"] == 6
    evaluator.run(None)  # type: ignore[arg-type]
    assert scorer.asked[0] == scorer.asked[1], "the same draw each time but for the policy"
    assert all(math.isfinite(float(value)) for value in evaluation.metrics().values())  # type: ignore[arg-type]


def test_an_evaluation_is_due_before_training_and_every_so_many_steps() -> None:
    def due(every: int) -> list[int]:
        evaluator = Evaluator(CannedScorer([]), [], Sampling(max_tokens=1), every, 1)  # type: ignore[arg-type]
        return [step for step in range(7) if evaluator.due(step)]

    assert due(3) == [0, 3, 6]
    assert due(0) == []
