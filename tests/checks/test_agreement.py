"""Which rows are found to disagree, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.checks.agreement import (
    DRIFT,
    FLOAT32,
    HALF,
    Agreement,
    DisagreementError,
    LogprobGaps,
    Tolerance,
    sample_unsignalled,
)
from retrain.types import Datum


def gaps(largest: list[float], tokens: int = 100, mean: list[float] | None = None) -> LogprobGaps:
    """Rows of one group; each differs at one token unless a mean is given."""
    rows = len(largest)
    means = np.array(mean) if mean is not None else np.array(largest) / tokens
    return LogprobGaps(np.zeros(rows, int), np.arange(rows), np.full(rows, tokens), means, np.array(largest))


def off(found: LogprobGaps, tolerance: Tolerance) -> list[int]:
    return np.flatnonzero(found.disagreeing(tolerance)).tolist()


def test_rounding_is_no_disagreement() -> None:
    assert off(gaps([1e-4, 5e-4, 1e-3, 2e-3]), FLOAT32) == []
    assert off(gaps([0.05, 0.1, 0.2, 0.3]), HALF) == []


def test_one_altered_token_is_found_among_sound_rows() -> None:
    assert off(gaps([1e-4] * 7 + [0.03]), FLOAT32) == [7]
    assert off(gaps([0.05] * 7 + [0.9]), HALF) == [7]


def test_a_row_that_is_off_as_a_whole_is_found_by_its_mean() -> None:
    # Ten times the usual mean of 0.02 is above the ceiling of 0.15, and that times 1.8 for a hundred tokens is 0.27.
    assert off(gaps([0.5] * 8, mean=[0.02] * 7 + [0.3]), HALF) == [7]


def test_a_noisy_sampler_sets_its_own_measure_up_to_a_ceiling() -> None:
    assert off(gaps([0.2] * 7 + [1.9]), HALF) == []
    assert off(gaps([0.2] * 7 + [2.1]), HALF) == [7]
    assert off(gaps([8.0] * 8), HALF) == list(range(8)), "no noise is that large"


def test_limits_follow_the_temperature_that_divides_the_logits() -> None:
    assert off(gaps([0.05] * 7 + [0.9]), HALF.at(0.5)) == []
    assert off(gaps([0.05] * 7 + [1.5]), HALF.at(0.5)) == [7]
    assert HALF.at(1.5) == HALF.at(1.0) == HALF


def test_every_row_off_by_more_than_noise_can_be_is_found() -> None:
    assert off(gaps([5.0] * 8), HALF) == list(range(8))
    assert off(gaps([0.15] * 8), FLOAT32) == list(range(8))


def test_older_samples_are_measured_by_their_drift_alone() -> None:
    assert off(gaps([2.0] * 8, mean=[0.5] * 8), DRIFT) == []
    assert off(gaps([0.2] * 7 + [3.0]), DRIFT) == [7]


def test_rows_that_nobody_sampled_are_not_compared() -> None:
    made_up = LogprobGaps(np.full(2, -1), np.full(2, -1), np.full(2, 9), np.full(2, 3.0), np.full(2, 9.0))
    assert off(made_up, FLOAT32) == []


def test_one_row_is_left_out_and_two_of_eight_stop_the_run() -> None:
    logged: list[str] = []
    agreement = Agreement(FLOAT32, logged.append)
    one = agreement.check(gaps([1e-4] * 7 + [3.0]), None, 0)
    assert (one.excluded, one.rejected) == (8, False), "advantages of the whole group rest on its reward"
    assert "group 0, completion 7 is off by 3 at one token" in logged[0] and "one log-prob" in logged[0]
    assert "the 8 rows of its group are excluded from the loss" in logged[0]
    two = agreement.check(gaps([1e-4] * 6 + [3.0, 2.0]), None, 0)
    assert two.rejected
    with pytest.raises(
        DisagreementError, match="2 of 8 rows do not match the trainer's: group 0, completion 6 is off by 3"
    ):
        raise two.error()


@pytest.mark.parametrize("staleness", [0, 1])
def test_samples_of_older_weights_may_also_be_off_because_the_learning_rate_is_too_high(staleness: int) -> None:
    found = Agreement(FLOAT32, lambda line: None).check(gaps([1e-4] * 6 + [9.0, 9.0]), None, staleness)
    assert ("Try: a smaller [training] lr" in str(found.error())) == bool(staleness)


def test_five_percent_of_many_rows_may_be_left_out() -> None:
    agreement = Agreement(FLOAT32, lambda line: None)
    assert not agreement.check(gaps([1e-4] * 95 + [3.0] * 5), None, 0).rejected
    assert agreement.check(gaps([1e-4] * 94 + [3.0] * 6), None, 0).rejected


def test_rows_that_are_only_looked_at_count_but_are_not_left_out() -> None:
    agreement = Agreement(FLOAT32, lambda line: None)
    found = agreement.check(gaps([1e-4] * 8), gaps([3.0]), 0)
    assert (found.excluded, found.rejected) == (0, False)
    assert agreement.check(gaps([1e-4] * 8), gaps([3.0, 3.0]), 0).rejected
    assert agreement.check(LogprobGaps.between([], []), gaps([3.0, 3.0]), 0).rejected, "nothing was trained on"


def test_a_mean_ratio_off_one_is_a_shift_unless_noise_explains_it() -> None:
    agreement = Agreement(HALF, lambda line: None)
    metrics = {"ratio_mean": 0.95, "kl_sample_train": 0.002}
    # One standard error is sqrt(2 * 0.002 / 10,000) = 0.0006, and 0.02 + 5 * 0.0006 is less than 0.05.
    assert agreement.shift(metrics, 10_000, 0) == pytest.approx(-0.05)
    assert agreement.shift(metrics, 20, 0) == 0.0
    assert agreement.shift(metrics, 10_000, 1) == 0.0
    assert agreement.shift({"ratio_mean": 1.01, "kl_sample_train": 0.002}, 10_000, 0) == 0.0


def test_rows_without_signal_are_drawn_from_the_seed_and_are_few() -> None:
    def row(index: int) -> Datum:
        ones = np.ones(20)
        return Datum(np.arange(5), np.arange(20), -ones, ones, ones > 0, 0, index)

    datums = [row(index) for index in range(50)]
    drawn = [[datum.index for datum in sample_unsignalled(datums, 10_000, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 4, "a hundredth of 10,000 tokens is four rows of 25"
    assert len(sample_unsignalled(datums, 0, 1)) == 1
    assert len(sample_unsignalled(datums, 10**9, 1)) == 16
    assert sample_unsignalled([], 10_000, 1) == []
