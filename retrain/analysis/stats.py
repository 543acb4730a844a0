"""Paired statistics across seeds: is one condition better than another, and how sure is that?

    compare({"grpo+none": {42: 0.71, 101: 0.69}, "maxrl+none": {42: 0.75, 101: 0.74}}) -> [Comparison, ...]
    noise_floor(conditions) -> NoiseFloor       how far apart runs of one condition are
    compare_problems(before_SP, after_SP)       the same runs, paired by held-out problem
    seeds_for_power(effect) -> int              seeds that find an effect of so many standard deviations
    sequential_test(differences, max_seeds)     may we stop? valid although one looks after every seed

The paired t-test decides: with five seeds no sign-flip test can go below 2/32, and a percentile bootstrap covers 84 to
90 %. The sign-flip p-value and a studentised bootstrap interval, which assume no normal distribution, stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from retrain.errors import ConfigError

Conditions = Mapping[str, Mapping[int, float]]
"""A number for each seed of each condition."""
Interval = tuple[float, float]
Verdict = Literal["statistically_significant_improvement", "significant_degradation", "insufficient_evidence"]
Floats = NDArray[np.float64]

BOOTSTRAP_DRAWS = 9999
# Three or four values of a two-peaked distribution look too much alike for a t-test: 6.1 % false alarms at 5 %.
FIRST_LOOK = 5
MOST_SEEDS = 1000
POWER = 0.8


@dataclass(frozen=True)
class PairedTest:
    """What n paired differences say. Numbers that n is too small for are None."""

    difference: float
    interval: Interval | None
    bootstrap_interval: Interval | None
    p_value: float | None
    permutation_p: float | None
    cohens_d: float | None
    """Mean over standard deviation of the differences."""


@dataclass(frozen=True)
class Comparison:
    """One condition against the baseline."""

    condition: str
    baseline: str
    seeds: tuple[int, ...]
    mean: float
    baseline_mean: float
    test: PairedTest
    p_adjusted: float | None
    """Holm's, over all conditions compared."""
    more_seeds: int | None
    """Further seeds for 80 % power, should the difference be what it seems; None when that cannot be said."""
    detectable: float | None
    """The difference that this many seeds would find in 80 % of cases."""
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """The verdict in plain words."""
        count = len(self.seeds)
        if count < 2:
            return (
                f"{self.condition} and {self.baseline} share one seed only: no interval is possible, and a difference "
                f"of {self.test.difference:+.4g} may be chance. Run at least 5 seeds."
            )
        if self.verdict != "insufficient_evidence":
            word = "better" if self.verdict == "statistically_significant_improvement" else "worse"
            low, high = self.test.interval or (self.test.difference, self.test.difference)
            return (
                f"{self.condition} is {word} than {self.baseline} by {abs(self.test.difference):.4g} "
                f"(95 % interval of the difference {low:+.4g} to {high:+.4g}, {count} seeds)."
            )
        start = f"{self.condition} is not distinguishable from {self.baseline} with {count} seeds."
        if self.test.cohens_d is None:
            return f"{start} The difference is {self.test.difference:+.4g} in every seed."
        if not self.test.cohens_d:
            return f"{start} On average over the seeds there is no difference."
        more = f"about {self.more_seeds} more seeds" if self.more_seeds else f"more than {MOST_SEEDS} seeds"
        return f"{start} If the difference is what it seems, it takes {more} to find it in 80 % of cases."


@dataclass(frozen=True)
class ProblemComparison:
    """Two sets of runs on the same held-out problems, rates averaged over seeds."""

    problems: int
    better: int
    worse: int
    difference: float
    interval: Interval | None
    p_value: float | None


@dataclass(frozen=True)
class NoiseFloor:
    """How much runs of one and the same condition differ."""

    standard_deviation: float
    degrees_of_freedom: int
    single_runs: float
    """Two single runs of one condition are further apart than this in one case of twenty."""


@dataclass(frozen=True)
class SequentialDecision:
    """Whether the looks so far decide a pair of conditions."""

    decided: bool
    better: bool
    """Whether the mean difference is above zero."""
    seeds: int
    p_value: float | None
    level: float
    """What p_value has to reach at each look, so that all looks together err at the stated alpha."""


def compare(
    conditions: Conditions, baseline: str | None = None, alpha: float = 0.05, higher_is_better: bool = True
) -> list[Comparison]:
    """Every condition against the baseline (the first one), paired by the seeds that both have."""
    if len(conditions) < 2:
        raise ConfigError("there is only one condition, so there is nothing to compare it with.")
    first = baseline if baseline is not None else next(iter(conditions))
    if first not in conditions:
        raise ConfigError(f"there is no condition {first!r}.  Try: one of {', '.join(conditions)}")
    others = [name for name in conditions if name != first]
    pairs = {name: _shared_seeds(conditions, first, name) for name in others}
    tests = {
        name: paired_test([conditions[name][s] - conditions[first][s] for s in seeds], alpha)
        for name, seeds in pairs.items()
    }
    tested = [name for name in others if tests[name].p_value is not None]
    holm = dict(zip(tested, adjust_holm([tests[name].p_value or 0.0 for name in tested]), strict=True))
    level = alpha / max(1, len(tested))
    return [
        _judge(conditions, (name, first), tests[name], _Bar(alpha, level, holm.get(name), higher_is_better))
        for name in others
    ]


@dataclass(frozen=True)
class _Bar:
    """What a difference is held against."""

    alpha: float
    level: float
    p_adjusted: float | None
    higher_is_better: bool


def _judge(conditions: Conditions, pair: tuple[str, str], test: PairedTest, bar: _Bar) -> Comparison:
    name, first = pair
    seeds = _shared_seeds(conditions, first, name)
    verdict: Verdict = "insufficient_evidence"
    if bar.p_adjusted is not None and bar.p_adjusted < bar.alpha:
        better = (test.difference > 0) == bar.higher_is_better
        verdict = "statistically_significant_improvement" if better else "significant_degradation"
    wanted = seeds_for_power(test.cohens_d, POWER, bar.level) if test.cohens_d else None
    return Comparison(
        condition=name,
        baseline=first,
        seeds=seeds,
        mean=float(np.mean([conditions[name][seed] for seed in seeds])),
        baseline_mean=float(np.mean([conditions[first][seed] for seed in seeds])),
        test=test,
        p_adjusted=bar.p_adjusted,
        more_seeds=max(1, wanted - len(seeds)) if wanted and verdict == "insufficient_evidence" else None,
        detectable=_detectable(test, len(seeds), bar.level),
        verdict=verdict,
    )


def paired_test(differences: Sequence[float], alpha: float = 0.05) -> PairedTest:
    """All tests of one set of paired differences."""
    values = np.asarray(differences, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ConfigError("a value to be compared is not a finite number.")
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return PairedTest(mean, None, None, None, None, None)
    spread = _spread(values)
    permutation_p = sign_flip_p(values)
    if spread == 0:
        # Equal in every seed: the spread is unknown, so t would be infinite; the sign-flip test still knows what to do.
        return PairedTest(mean, None, None, permutation_p, permutation_p, None)
    low, high = t_interval(values, alpha)
    return PairedTest(
        difference=mean,
        interval=(float(low), float(high)),
        bootstrap_interval=bootstrap_interval(values, alpha),
        p_value=float(t_p_value(values)),
        permutation_p=permutation_p,
        cohens_d=mean / spread,
    )


def _spread(values: Floats) -> float:
    """The standard deviation; 0 when it is no more than rounding."""
    spread = float(values.std(ddof=1))
    return 0.0 if spread <= 1e-12 * float(np.abs(values).max()) else spread


def t_interval(differences: Floats, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """Student's interval of the mean, over the last axis."""
    n = differences.shape[-1]
    half = stats.t.ppf(1 - alpha / 2, n - 1) * differences.std(axis=-1, ddof=1) / math.sqrt(n)
    mean = differences.mean(axis=-1)
    return mean - half, mean + half


def t_p_value(differences: Floats) -> Floats:
    """Two-sided p-value of the paired t-test, over the last axis."""
    result: Floats = stats.ttest_1samp(differences, 0.0, axis=-1).pvalue
    return result


def sign_flip_p(differences: Floats) -> float:
    """Two-sided permutation p-value: exact over all 2^n sign flips up to 13 pairs, else of 9999 random ones."""
    if not np.any(differences):
        return 1.0
    result: Any = stats.permutation_test(
        (differences,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def bootstrap_interval(differences: Floats, alpha: float = 0.05, draws: int = BOOTSTRAP_DRAWS) -> Interval | None:
    """Studentised paired bootstrap (Efron & Tibshirani 1993, chapter 12); None where too few values differ.

    Each resample's mean is measured in its own standard error, which makes up for the spread that a resample of a few
    values loses. A resample of equal values has none; when these reach into the tails there is no interval.
    """
    low, high = bootstrap_intervals(differences[None], alpha, draws)
    bounds = float(low[0]), float(high[0])
    return bounds if all(map(math.isfinite, bounds)) else None


def bootstrap_intervals(differences: Floats, alpha: float, draws: int) -> tuple[Floats, Floats]:
    """The same for each row of a matrix, all with the same resamples; infinite where there is none."""
    n = differences.shape[1]
    picks = np.random.default_rng(0).integers(0, n, size=(draws, n))
    resampled = differences[:, picks]
    mean = differences.mean(axis=1)
    error = differences.std(axis=1, ddof=1) / math.sqrt(n)
    off = resampled.mean(axis=2) - mean[:, None]
    errors = resampled.std(axis=2, ddof=1) / math.sqrt(n)
    none = errors <= 1e-9 * error[:, None]
    scores = np.where(none, np.copysign(np.inf, off), off / np.where(none, 1.0, errors))
    ordered = np.sort(scores, axis=1)
    cut = int((draws + 1) * alpha / 2)
    return mean - ordered[:, draws - cut] * error, mean - ordered[:, cut - 1] * error


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: the chance of any false alarm over all of them stays at alpha."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    adjusted = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, dtype=np.float64)[order] * factors))
    result = np.empty(len(p_values))
    result[order] = adjusted
    return [float(value) for value in result]


def noise_floor(conditions: Conditions) -> NoiseFloor | None:
    """The spread between seeds within conditions, pooled; None when no condition has two seeds."""
    groups = [np.array(list(seeds.values()), dtype=np.float64) for seeds in conditions.values() if len(seeds) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return None
    spread = math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / degrees)
    return NoiseFloor(spread, degrees, float(stats.t.ppf(0.975, degrees)) * math.sqrt(2) * spread)


def compare_problems(before_SP: Floats, after_SP: Floats, alpha: float = 0.05) -> ProblemComparison:
    """Rates of seeds × problems before and after, paired by problem. It speaks of these runs, not of other seeds."""
    differences = after_SP.mean(axis=0) - before_SP.mean(axis=0)
    test_it = len(differences) > 1 and _spread(differences) > 0
    low, high = t_interval(differences, alpha) if test_it else (0.0, 0.0)
    return ProblemComparison(
        problems=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        difference=float(differences.mean()),
        interval=(float(low), float(high)) if test_it else None,
        p_value=float(t_p_value(differences)) if test_it else None,
    )


def seeds_for_power(effect: float, power: float = POWER, alpha: float = 0.05) -> int | None:
    """The least number of paired seeds that finds an effect of `effect` standard deviations; None above a thousand."""
    if _power_of(effect, MOST_SEEDS, alpha) < power:
        return None
    low, high = 2, MOST_SEEDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _power_of(effect, middle, alpha) >= power else (middle + 1, high)
    return low


def _power_of(effect: float, n: int, alpha: float) -> float:
    """Chance that a two-sided paired t-test of n seeds finds the effect.

    Given the estimated spread, the statistic is normal; we average over its distribution. scipy's non-central t
    distribution is the same thing in closed form, but gives NaN for large effects.
    """
    limits, centre = special.stdtrit(n - 1, 1 - alpha / 2) * _estimated_spreads(n), abs(effect) * math.sqrt(n)
    return float(np.mean(special.ndtr(centre - limits) + special.ndtr(-centre - limits)))


@lru_cache(maxsize=64)
def _estimated_spreads(n: int) -> Floats:
    """Quantiles of the standard deviation that n draws show, in units of the true one."""
    result: Floats = np.sqrt(special.chdtri(n - 1, (np.arange(400) + 0.5) / 400) / (n - 1))
    return result


def _detectable(test: PairedTest, n: int, level: float) -> float | None:
    """The difference that n seeds with this spread would find in 80 % of cases."""
    if not test.cohens_d:
        return None
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _power_of(middle, n, level) >= POWER else (middle, high)
    return high * abs(test.difference / test.cohens_d)


def _shared_seeds(conditions: Conditions, one: str, other: str) -> tuple[int, ...]:
    shared = tuple(sorted(conditions[one].keys() & conditions[other].keys()))
    if not shared:
        raise ConfigError(
            f"{one} and {other} have no seed in common, so no pairs can be made.  Try: run both with the same seeds"
        )
    return shared


def sequential_test(
    differences: Sequence[float], max_seeds: int, alpha: float = 0.05, comparisons: int = 1
) -> SequentialDecision:
    """May a pair of conditions stop? Look after every seed, from the fifth to `max_seeds`, in the order they finished.

    Each look is a paired t-test at one lower level, the same at all looks, chosen so that all of them together raise a
    false alarm with chance alpha (Pocock 1977), shared out over `comparisons` pairs that are watched at once.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) > max_seeds:
        raise ValueError(f"{len(values)} differences are more than max_seeds = {max_seeds}")
    level = sequential_level(max_seeds, alpha / comparisons)
    n, mean = len(values), float(values.mean()) if len(values) else 0.0
    if n < FIRST_LOOK:
        return SequentialDecision(False, mean > 0, n, None, level)
    p_value = sign_flip_p(values) if _spread(values) == 0 else float(t_p_value(values))
    return SequentialDecision(p_value <= level, mean > 0, n, p_value, level)


@lru_cache
def sequential_level(max_seeds: int, alpha: float) -> float:
    """The level of each look: the alpha-quantile of the smallest p-value a path of t-tests meets under no effect.

    The path's distribution does not depend on the spread of the differences, so one simulation serves all data.
    """
    if max_seeds < FIRST_LOOK:
        return 0.0
    draws = np.random.default_rng(0).standard_normal((100_000, max_seeds))
    counts = np.arange(1, max_seeds + 1)
    sums, squares = draws.cumsum(axis=1), (draws**2).cumsum(axis=1)
    variances = (squares - sums**2 / counts)[:, FIRST_LOOK - 1 :] / (counts[FIRST_LOOK - 1 :] - 1)
    scores = np.abs(sums[:, FIRST_LOOK - 1 :]) / np.sqrt(variances * counts[FIRST_LOOK - 1 :])
    smallest = (2 * stats.t.sf(scores, counts[FIRST_LOOK - 1 :] - 1)).min(axis=1)
    return float(np.quantile(smallest, alpha))
