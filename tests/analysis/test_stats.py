"""Hand-worked numbers, and thousands of synthetic campaigns whose truth is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from cases import slow
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from retrain.analysis.looks import Looks, sequential_level
from retrain.analysis.stats import (
    Floats,
    adjust_holm,
    bootstrap_interval,
    bootstrap_intervals,
    compare,
    compare_problems,
    noise_floor,
    paired_test,
    seeds_for_power,
    sequential_test,
    sign_flip_p,
    t_interval,
    t_p_value,
)
from retrain.errors import ConfigError

ALPHA = 0.05
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]

# Differences between two runs of the same seed, centred at the truth.
NOISE: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(4, size=shape),
    "pass rates of 128 problems": lambda rng, shape: (
        (rng.binomial(128, 0.8, size=shape) - rng.binomial(128, 0.8, size=shape)) / 128.0
    ),
    "a mixture of lucky and unlucky seeds": lambda rng, shape: (
        rng.normal(size=shape) + rng.choice([-1.0, 1.0], size=shape)
    ),
}


@pytest.mark.parametrize("seeds", [5, 6, 8, 10])
@pytest.mark.parametrize("noise", NOISE)
def test_the_deciding_interval_covers_the_truth_in_93_to_97_of_100_campaigns(noise: str, seeds: int) -> None:
    differences = NOISE[noise](np.random.default_rng(seeds), (20_000, seeds))
    low, high = t_interval(differences)
    assert 0.93 <= np.mean((low <= 0) & (high >= 0)) <= 0.97


@pytest.mark.parametrize("seeds", [5, *slow(8, 10)])
@pytest.mark.parametrize("noise", NOISE)
def test_the_bootstrap_interval_covers_the_truth_in_93_to_97_of_100_campaigns(noise: str, seeds: int) -> None:
    differences = NOISE[noise](np.random.default_rng(seeds), (3000, seeds))
    low, high = bootstrap_intervals(differences, ALPHA, 999)
    exists = np.isfinite(low) & np.isfinite(high)
    assert exists.mean() > 0.9
    assert 0.925 <= np.mean(((low <= 0) & (high >= 0))[exists]) <= 0.97


@pytest.mark.parametrize("alpha", [1e-4, 2e-4, 0.5])
def test_tails_thinner_than_the_resamples_have_no_bootstrap_interval(alpha: float) -> None:
    interval = bootstrap_interval(np.array([0.1, 0.25, 0.32, 0.47, 0.51, 0.68, 0.7, 0.83]), alpha)
    assert (interval is None) == (alpha < 2e-4)


@pytest.mark.parametrize("conditions", [1, 4])
@pytest.mark.parametrize("noise", NOISE)
def test_under_no_effect_any_verdict_is_as_rare_as_alpha_says(noise: str, conditions: int) -> None:
    rng = np.random.default_rng(3)
    # One baseline against several conditions, so the comparisons of a campaign are not independent.
    draws = NOISE[noise](rng, (4000, conditions + 1, 6))
    p_values = t_p_value(draws[:, 1:] - draws[:, :1])
    alarms = [min(adjust_holm(list(row))) < ALPHA for row in p_values]
    assert np.mean(alarms) <= ALPHA + 0.01


@pytest.mark.slow
def test_complete_campaigns_without_effect_raise_few_false_alarms_and_those_with_one_are_found() -> None:
    rng = np.random.default_rng(4)
    false, found = 0, 0
    for _ in range(300):
        base, same, better = rng.normal(0.7, 0.02, size=(3, 6))
        campaign = {"a": base, "b": same, "c": better + 0.1}
        b, c = compare({name: dict(enumerate(map(float, row))) for name, row in campaign.items()})
        false += b.verdict != "insufficient_evidence"
        found += c.verdict == "statistically_significant_improvement"
    # 300 campaigns at 5%: 27 or more would happen once in ten thousand tries.
    assert false < 27
    assert found > 270


def test_looking_after_every_seed_keeps_the_error_rate() -> None:
    for draw in NOISE.values():
        paths = draw(np.random.default_rng(5), (10_000, 8))
        level = sequential_level(8, ALPHA)
        alarms = np.any([t_p_value(paths[:, :n]) <= level for n in range(5, 9)], axis=0)
        assert alarms.mean() <= ALPHA + 0.01


# Paired t-tests of the first 5 to 8 have p-values above the level of the looks, 0.0225, and the last one has 0.033.
UNDECIDED = (0.06, -0.02, 0.05, 0.01, 0.07, 0.02, 0.05, 0.0)


def test_a_campaign_that_could_stop_early_is_judged_at_the_level_of_its_looks() -> None:
    seeds = range(1, 9)
    values = {"a": dict.fromkeys(seeds, 0.5), "b": {seed: 0.5 + UNDECIDED[seed - 1] for seed in seeds}}
    ps = [float(t_p_value(np.array(UNDECIDED[:n]))) for n in range(5, 9)]
    level = sequential_level(8, ALPHA)
    assert level < min(ps) and ps[-1] < ALPHA
    (plain,) = compare(values)
    assert plain.verdict == "statistically_significant_improvement"
    (open_,) = compare(values, looks=Looks(8, 1))
    assert open_.verdict == "insufficient_evidence"
    assert open_.confidence == pytest.approx(1 - level)
    assert open_.test.interval is not None and open_.test.interval[0] < 0
    assert open_.p_adjusted is not None and open_.p_adjusted > ALPHA
    (decided,) = compare(values, looks=Looks(8, 1, frozenset({"b"})))
    assert decided.verdict == "statistically_significant_improvement", "an earlier look is final"
    clear = {"a": values["a"], "b": {seed: 0.8 + UNDECIDED[seed - 1] for seed in seeds}}
    assert compare(clear, looks=Looks(8, 1))[0].verdict == "statistically_significant_improvement"
    early = {name: {seed: rates[seed] for seed in (1, 2, 3, 4)} for name, rates in clear.items()}
    assert compare(early, looks=Looks(8, 1))[0].verdict == "insufficient_evidence", "before the first look"


@pytest.mark.parametrize(("max_seeds", "comparisons"), [(8, 1), (12, 1), (20, 1), (8, 3)])
def test_looks_and_the_last_verdict_together_keep_the_error_rate(max_seeds: int, comparisons: int) -> None:
    looks, rng = Looks(max_seeds, comparisons), np.random.default_rng(max_seeds)
    shape = (20_000, comparisons, max_seeds)
    draws = rng.normal(size=shape)
    smallest = np.min([t_p_value(draws[..., :n]) for n in range(5, max_seeds + 1)], axis=0).min(axis=1)
    assert np.mean(smallest <= looks.level(ALPHA)) <= ALPHA + 0.006
    # The adjusted p-value is below alpha where the p-value is below the level.
    assert looks.adjust(looks.level(ALPHA)) == pytest.approx(ALPHA, abs=0.001)


def test_a_sequential_test_needs_five_seeds_and_decides_on_a_clear_difference() -> None:
    clear = [0.30, 0.31, 0.29, 0.305, 0.3]
    assert not sequential_test(clear[:4], max_seeds=8).decided
    decision = sequential_test(clear, max_seeds=8)
    assert decision.decided and decision.better and decision.seeds == 5
    assert decision.level < ALPHA / 2
    assert not sequential_test([-x for x in clear], max_seeds=8).better
    assert not sequential_test([0.1, -0.1, 0.05, 0.01, 0.0], max_seeds=8).decided
    assert not sequential_test([], max_seeds=8).decided
    assert sequential_test(clear, 8, comparisons=4).level < decision.level
    with pytest.raises(ValueError, match="more than max_seeds"):
        sequential_test(clear, max_seeds=4)


def test_equal_differences_do_not_stop_a_campaign_by_a_spread_of_zero() -> None:
    assert not sequential_test([0.25] * 5, max_seeds=8).decided


def test_a_worked_example() -> None:
    # Differences 1, 2, 3, 4: mean 2.5, sd 1.29099, se 0.645497, t = 3.87298, 3 degrees of freedom, t_.975 = 3.18245.
    result = paired_test([1.0, 2.0, 3.0, 4.0])
    assert result.difference == 2.5
    assert result.interval == pytest.approx((2.5 - 3.18245 * 0.645497, 2.5 + 3.18245 * 0.645497), abs=1e-4)
    assert result.p_value == pytest.approx(0.0305, abs=1e-4)
    assert result.permutation_p == pytest.approx(2 / 16)
    assert result.cohens_d == pytest.approx(2.5 / 1.29099, abs=1e-4)


@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=2, max_size=7))
def test_the_sign_flip_p_value_is_the_share_of_flips_as_far_from_zero(differences: list[float]) -> None:
    values = np.array(differences)
    means = [abs(np.mean(values * signs)) for signs in itertools.product((1, -1), repeat=len(values))]
    share = np.mean(np.array(means) >= abs(values.mean()) - 1e-9)
    assert sign_flip_p(values) == pytest.approx(share)


def test_holm_is_the_textbook_one() -> None:
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([]) == []


def test_seeds_for_power_agree_with_published_tables() -> None:
    # Cohen's d of differences 0.5, 0.8 and 1.0, two-sided 5%, 80%: G*Power gives 34, 15 and 10 pairs.
    assert [seeds_for_power(effect) for effect in (0.5, 0.8, 1.0, -1.0)] == [34, 15, 10, 10]
    assert seeds_for_power(0.001) is None
    assert seeds_for_power(50.0) == 2


def test_the_noise_floor_pools_the_spread_of_seeds() -> None:
    # Sums of squares 2 and 8 over 2 + 1 degrees of freedom.
    floor = noise_floor({"a": {1: 1.0, 2: 2.0, 3: 3.0}, "b": {1: 0.0, 2: 4.0}, "c": {1: 9.0}})
    assert floor is not None
    assert floor.standard_deviation == pytest.approx((10 / 3) ** 0.5)
    assert floor.degrees_of_freedom == 3
    assert floor.single_runs == pytest.approx(stats.t.ppf(0.975, 3) * 2**0.5 * (10 / 3) ** 0.5)
    assert noise_floor({"a": {1: 1.0}}) is None
    # Three times 0.1 has a mean that is not 0.1.
    equal = noise_floor({"a": {1: 0.1, 2: 0.1, 3: 0.1}, "b": {1: 0.7, 2: 0.7, 3: 0.7}})
    assert equal is not None and equal.standard_deviation == 0.0


def test_verdicts_follow_the_direction_of_the_metric() -> None:
    low, high = {s: 0.1 + s / 1000 for s in range(5)}, {s: 0.9 - s * s / 1000 for s in range(5)}
    assert compare({"a": low, "b": high})[0].verdict == "statistically_significant_improvement"
    assert compare({"a": high, "b": low})[0].verdict == "significant_degradation"
    assert compare({"a": low, "b": high}, higher_is_better=False)[0].verdict == "significant_degradation"
    assert "better" in compare({"a": high, "b": low}, baseline="b")[0].sentence


def test_one_seed_says_that_no_interval_is_possible() -> None:
    (only,) = compare({"a": {42: 0.1}, "b": {42: 0.9}})
    assert only.verdict == "insufficient_evidence"
    assert (only.test.interval, only.test.p_value, only.p_adjusted) == (None, None, None)
    assert "there is no interval" in only.sentence


def test_pairs_are_made_of_shared_seeds_only() -> None:
    (pair,) = compare({"a": {1: 0.0, 2: 0.1, 3: 0.9}, "b": {2: 0.3, 3: 1.0, 4: 5.0}})
    assert pair.seeds == (2, 3)
    assert pair.test.difference == pytest.approx(0.15)
    with pytest.raises(ConfigError, match="no seed in common"):
        compare({"a": {1: 0.0}, "b": {2: 0.0}})


def test_what_is_not_distinguishable_says_how_many_seeds_it_would_take() -> None:
    (pair,) = compare({"a": dict.fromkeys(range(5), 0.0), "b": {0: 1.0, 1: -1.0, 2: 1.0, 3: -0.5, 4: 1.0}})
    assert pair.verdict == "insufficient_evidence"
    assert pair.more_seeds is not None and f"{pair.more_seeds} more seeds" in pair.sentence
    assert pair.detectable is not None and pair.detectable > abs(pair.test.difference)


def test_from_two_seeds_no_number_of_seeds_is_estimated() -> None:
    (pair,) = compare({"a": {1: 0.4, 2: 0.5}, "b": {1: 0.5, 2: 0.62}})
    assert pair.verdict == "insufficient_evidence"
    assert pair.sentence.endswith(
        "with 2 seeds. That is too few to estimate how many are needed. Run at least 5 seeds."
    )


def test_equal_values_in_every_seed_are_no_evidence() -> None:
    same = dict.fromkeys(range(8), 0.5)
    (pair,) = compare({"a": same, "b": same})
    assert (pair.verdict, pair.test.p_value) == ("insufficient_evidence", 1.0)
    (shifted,) = compare({"a": same, "b": dict.fromkeys(range(8), 0.75)})
    assert shifted.test.p_value == pytest.approx(2 / 256)


def test_nothing_to_compare_is_rejected() -> None:
    with pytest.raises(ConfigError, match="only one condition"):
        compare({"a": {1: 0.0}})
    with pytest.raises(ConfigError, match="no condition 'z'"):
        compare({"a": {1: 0.0}, "b": {1: 0.0}}, baseline="z")
    with pytest.raises(ConfigError, match="not a finite number"):
        compare({"a": {1: 0.0}, "b": {1: float("nan")}})


def test_problems_are_paired_one_by_one() -> None:
    before, after = np.array([[0.0, 1.0, 0.0, 0.5]]), np.array([[1.0, 1.0, 1.0, 0.0]])
    result = compare_problems(before, after)
    assert (result.problems, result.better, result.worse) == (4, 2, 1)
    assert result.difference == pytest.approx(0.375)
    assert result.interval is not None and result.interval[0] < 0 < result.interval[1]
    assert compare_problems(before, before).p_value is None


def test_differences_that_cancel_are_not_reported_as_equal_in_every_seed() -> None:
    opposite = compare({"a": {1: 0.5, 2: 0.5}, "b": {1: 0.4, 2: 0.6}})[0].sentence
    assert "The mean difference is zero." in opposite
    equal = compare({"a": {1: 0.5, 2: 0.5}, "b": {1: 0.5, 2: 0.5}})[0].sentence
    assert "Both have the same value in every seed." in equal


def test_a_significant_difference_of_few_seeds_carries_a_caution() -> None:
    rates = {"a": {1: 0.5, 2: 0.51, 3: 0.52}, "b": {1: 0.6, 2: 0.611, 3: 0.619}}
    few = compare(rates)[0]
    assert few.verdict == "statistically_significant_improvement"
    assert "which so few seeds cannot show: run at least 5." in few.sentence
    more = {name: values | {4: values[1] + 0.03, 5: values[2] + 0.03} for name, values in rates.items()}
    assert "so few" not in compare(more)[0].sentence
