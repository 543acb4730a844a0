"""Each formula against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from retrain.advantages import UncertaintyContext, grpo, maxrl, predictive_variance, shannon_entropy, surprisal
from retrain.advantages.ragged import Ragged
from retrain.advantages.token import gtpo_weights, hicra_amplify, sepa_pool
from retrain.errors import ConfigError


def test_grpo_is_the_reward_less_the_mean_of_the_group() -> None:
    assert grpo(np.array([1.0, 0.0, 0.0, 1.0, 0.5])).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]


def test_maxrl_divides_by_the_mean_so_that_rare_success_weighs_more() -> None:
    # mean 1/4: (1 - 1/4) / (1/4 + 1e-6) and (0 - 1/4) / (1/4 + 1e-6)
    assert maxrl(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx([0.75 / 0.250001] + [-0.25 / 0.250001] * 3)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1e-6, 1e-6], [-1e-7, 1e-7]])
def test_maxrl_is_zero_when_the_mean_is_not_above_a_millionth(rewards: list[float]) -> None:
    assert maxrl(np.array(rewards)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[-1.0, -1.0, -1.0, 1.0], [-0.5, 0.500007], [-2.0, -1.0]])
def test_maxrl_rejects_negative_rewards_and_says_what_to_do(rewards: list[float]) -> None:
    with pytest.raises(ConfigError, match=r'at least 0, and one is -.*Try: advantage_mode = "grpo", or add') as caught:
        maxrl(np.array(rewards))
    assert f"one is {min(rewards):g}." in str(caught.value) and "add a constant to every reward" in str(caught.value)


@pytest.mark.parametrize("size", [2, 16, 1024])
@pytest.mark.parametrize("others", [0.0, -1e-6, 1e-9])
def test_maxrl_of_one_success_among_many_stays_below_the_size_of_the_group(size: int, others: float) -> None:
    earned = maxrl(np.array([1.0] + [others] * (size - 1)))
    assert earned[0] <= (size - 1) * (1 + 1e-12)
    assert earned[0] == pytest.approx(size - 1, rel=2e-3)
    assert earned.min() >= -1.0 - 1e-12


def test_surprisal_is_the_negative_logprob_between_0_and_50() -> None:
    logprobs = np.array([math.log(0.5), 1e-9, -49.0, -51.0, -math.inf])
    assert surprisal(UncertaintyContext(logprobs)) == pytest.approx([math.log(2), 0.0, 49.0, 50.0, 50.0])


def test_predictive_variance_is_p_times_one_minus_p() -> None:
    logprobs = np.log([0.5, 0.9, 1.0])
    assert predictive_variance(UncertaintyContext(logprobs)) == pytest.approx([0.25, 0.09, 0.0])


def test_shannon_entropy_is_what_the_engine_returned() -> None:
    context = UncertaintyContext(np.log([0.5, 0.9]), np.array([0.7, 0.3]))
    assert shannon_entropy(context).tolist() == [0.7, 0.3]


def test_shannon_entropy_without_entropies_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs the true entropy"):
        shannon_entropy(UncertaintyContext(np.log([0.5])))


def test_only_shannon_entropy_needs_entropies() -> None:
    kinds = (surprisal, predictive_variance, shannon_entropy)
    assert [kind.needs_entropies for kind in kinds] == [False, False, True]


def test_gtpo_weighs_by_uncertainty_over_its_mean() -> None:
    # means 2 and 1: 1 + 0.5 (H / 2 - 1) = 0.75, 1, 1.25 and 1 + 0.5 (1 - 1) = 1
    weights = gtpo_weights(np.array([1.0, 2.0, 3.0, 1.0]), Ragged(np.array([3, 1])), beta=0.5)
    assert weights == pytest.approx([0.75, 1.0, 1.25, 1.0])


def test_gtpo_never_goes_below_zero() -> None:
    # mean 2, beta 3: 1 + 3 (0 / 2 - 1) = -2 becomes 0; 1 + 3 (4 / 2 - 1) = 4
    assert gtpo_weights(np.array([0.0, 4.0]), Ragged(np.array([2])), beta=3.0) == pytest.approx([0.0, 4.0])


def test_gtpo_leaves_a_completion_alone_that_was_never_unsure() -> None:
    uncertainty = np.array([0.0, 0.0, 1.0, 3.0])
    weights = gtpo_weights(uncertainty, Ragged(np.array([2, 2])), beta=0.5)
    assert weights == pytest.approx([1.0, 1.0, 0.75, 1.25])


def test_hicra_adds_alpha_of_the_size_on_planning_tokens_only() -> None:
    amplified = hicra_amplify(np.array([1.0, 1.0, -1.0, -1.0]), np.array([True, False, True, False]), alpha=0.2)
    assert amplified == pytest.approx([1.2, 1.0, -0.8, -1.0])


def test_sepa_draws_execution_tokens_to_their_mean_and_spares_planning() -> None:
    # execution mean of the first completion (1 + 3) / 2 = 2; lambda 1/4: 0.25 * 2 + 0.75 * H
    pooled = sepa_pool(
        np.array([1.0, 8.0, 3.0, 5.0]), np.array([True, False, True, True]), Ragged(np.array([3, 1])), sepa_lambda=0.25
    )
    assert pooled == pytest.approx([1.25, 8.0, 2.75, 5.0])


def test_ragged_sums_are_right_around_empty_rows() -> None:
    ragged = Ragged(np.array([0, 2, 0, 0, 1, 0]))
    assert ragged.sum(np.array([1.0, 2.0, 4.0])).tolist() == [0.0, 3.0, 0.0, 0.0, 4.0, 0.0]
    assert ragged.count(np.array([True, False, True])).tolist() == [0, 1, 0, 0, 1, 0]
    assert [row.tolist() for row in ragged.split(np.array([1, 2, 4]))] == [[], [1, 2], [], [], [4], []]
    assert [ragged.locate(index) for index in range(3)] == [(1, 0), (1, 1), (4, 0)]


def test_ragged_without_any_value_sums_to_nothing() -> None:
    assert Ragged(np.array([0, 0])).sum(np.zeros(0)).tolist() == [0.0, 0.0]
    assert Ragged(np.zeros(0, dtype=np.int64)).sum(np.zeros(0)).tolist() == []
