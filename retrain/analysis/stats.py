"""Paired statistics across seeds: is one condition better than another, and with what confidence?

    compare({"grpo+none": {42: 0.71, 101: 0.69}, "maxrl+none": {42: 0.75, 101: 0.74}}) -> [Comparison, ...]
    noise_floor(conditions) -> NoiseFloor       spread between runs of one condition
    compare_problems(before_SP, after_SP)       the same runs, paired by held-out problem
    seeds_for_power(effect) -> int              seeds needed to detect an effect (in standard deviations)
    sequential_test(differences, max_seeds)     early stopping, valid when tested after every seed

Verdicts use the paired t-test: with five seeds a sign-flip test cannot go below 2/32, and a percentile bootstrap covers
only 84 to 90%. The sign-flip p-value and a studentized bootstrap interval, which assume no normal distribution, are
reported alongside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special, stats

from retrain.analysis.looks import Floats, Looks, sequential_level
from retrain.config.tables.run import FIRST_LOOK
from retrain.errors import ConfigError
from retrain.runtime.text import plural

Conditions = Mapping[str, Mapping[int, float]]
"""A number for each seed of each condition."""
Interval = tuple[float, float]
Verdict = Literal[
    "statistically_significant_improvement",
    "significant_degradation",
    "significant_difference",
    "insufficient_evidence",
]
"""A difference is neither an improvement nor a degradation where neither direction is better."""

BOOTSTRAP_DRAWS = 9999
MAX_SEEDS = 1000
ENOUGH_SEEDS = 5
"""Minimum number of seeds; with fewer, the spread between them is too uncertain to plan with."""
POWER = 0.8


@dataclass(frozen=True)
class PairedTest:
    """Tests of n paired differences; None where n is too small."""

    difference: float
    interval: Interval | None
    bootstrap_interval: Interval | None
    p_value: float | None
    permutation_p: float | None
    cohens_d: float | None
    """Mean divided by the standard deviation of the differences."""


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
    """p-value corrected for the number of conditions (Holm) and, in a sequential test, for its looks."""
    more_seeds: int | None
    """Additional seeds for 80% power at the observed difference; None when unknown."""
    detectable: float | None
    """The difference that this many seeds detect with 80% power."""
    verdict: Verdict
    confidence: float = 0.95
    """Confidence level of the intervals."""

    @property
    def caution(self) -> str:
        """What to add to a significant difference of few seeds."""
        if len(self.seeds) >= ENOUGH_SEEDS:
            return ""
        return (
            " The test assumes that differences are normally distributed, which so few seeds cannot show: run at least "
            f"{ENOUGH_SEEDS}."
        )

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        count = len(self.seeds)
        if count < 2:
            return (
                f"{self.condition} and {self.baseline} share only one seed: there is no interval, and a difference "
                f"of {self.test.difference:+.4g} may be noise. Run at least {ENOUGH_SEEDS} seeds."
            )
        if self.verdict != "insufficient_evidence":
            where = f"in every one of {count} seeds"
            if self.test.interval:
                low, high = self.test.interval
                interval = f"{100 * self.confidence:.4g}% interval of the difference {low:+.4g} to {high:+.4g}"
                where = f"({interval}, {count} seeds)"
            if self.verdict == "significant_difference":
                size = f"{self.test.difference:+.4g}"
                return f"{self.condition} differs from {self.baseline} by {size} {where}.{self.caution}"
            word = "better" if self.verdict == "statistically_significant_improvement" else "worse"
            size = f"{abs(self.test.difference):.4g}"
            return f"{self.condition} is {word} than {self.baseline} by {size} {where}.{self.caution}"
        start = f"{self.condition} is not distinguishable from {self.baseline} with {count} seeds."
        if self.test.cohens_d is None and not self.test.difference:
            return f"{start} Both have the same value in every seed."
        if self.test.cohens_d is None:
            return f"{start} The difference is {self.test.difference:+.4g} in every seed."
        if not self.test.cohens_d:
            return f"{start} The mean difference is zero."
        if count < ENOUGH_SEEDS:
            return f"{start} That is too few to estimate how many are needed. Run at least {ENOUGH_SEEDS} seeds."
        more = f"about {plural(self.more_seeds, 'more seed')}" if self.more_seeds else f"more than {MAX_SEEDS} seeds"
        return f"{start} If the true difference equals the observed one, 80% power needs {more}."


@dataclass(frozen=True)
class ProblemComparison:
    """Two sets of runs on the same held-out problems, rates averaged over seeds."""

    problems: int
    better: int
    worse: int
    difference: float
    interval: Interval | None
    p_value: float | None
    left_out: int = 0
    """Problems that one of the runs has no score for."""
    are_same: bool = True
    """Whether all runs have scores for the same problems."""


@dataclass(frozen=True)
class NoiseFloor:
    """How much runs of one condition differ."""

    standard_deviation: float
    degrees_of_freedom: int
    single_runs: float
    """In 5% of cases, two runs of one condition differ by more than this."""


@dataclass(frozen=True)
class SequentialDecision:
    """Whether the results so far decide a pair of conditions."""

    decided: bool
    better: bool
    """Whether the mean difference is above zero."""
    seeds: int
    p_value: float | None
    level: float
    """Significance level of each look, such that all looks together have a false positive rate of alpha."""


def compare(
    conditions: Conditions,
    baseline: str | None = None,
    alpha: float = 0.05,
    higher_is_better: bool | None = True,
    looks: Looks | None = None,
) -> list[Comparison]:
    """Compare every condition with the baseline (by default the first), paired by the seeds that both have.

    `higher_is_better` is None where neither direction is better: verdicts are then differences.
    With `looks`, the number of seeds depended on the results, so tests and intervals use the level of the looks.
    """
    if len(conditions) < 2:
        raise ConfigError("there is only one condition; a comparison needs two.")
    first = baseline if baseline is not None else next(iter(conditions))
    if first not in conditions:
        raise ConfigError(f"there is no condition {first!r}.  Try: one of {', '.join(conditions)}")
    pairs = {name: _shared_seeds(conditions, first, name) for name in conditions if name != first}
    level = looks.level(alpha) if looks else alpha
    tests = {
        name: paired_test([conditions[name][s] - conditions[first][s] for s in seeds], level)
        for name, seeds in pairs.items()
    }
    p_values = {name: test.p_value for name, test in tests.items() if test.p_value is not None}
    if looks:
        adjusted = {name: looks.adjust(p) for name, p in p_values.items()}
        found = {name for name, p in p_values.items() if p <= level and len(pairs[name]) >= FIRST_LOOK} | looks.decided
    else:
        adjusted = dict(zip(p_values, adjust_holm(list(p_values.values())), strict=True))
        found = {name for name, p in adjusted.items() if p < alpha}
    power_level = level if looks else alpha / max(1, len(p_values))
    return [
        _decide(
            conditions,
            (name, first),
            test,
            _Criterion(name in found, adjusted.get(name), power_level, 1 - level, higher_is_better),
        )
        for name, test in tests.items()
    ]


@dataclass(frozen=True)
class _Criterion:
    """Whether a difference counts as significant, and the levels that this was judged with."""

    is_significant: bool
    p_adjusted: float | None
    power_level: float
    confidence: float
    higher_is_better: bool | None


def _decide(conditions: Conditions, pair: tuple[str, str], test: PairedTest, criterion: _Criterion) -> Comparison:
    name, first = pair
    seeds = _shared_seeds(conditions, first, name)
    verdict: Verdict = "insufficient_evidence"
    if criterion.is_significant and criterion.higher_is_better is None:
        verdict = "significant_difference"
    elif criterion.is_significant:
        better = (test.difference > 0) == criterion.higher_is_better
        verdict = "statistically_significant_improvement" if better else "significant_degradation"
    wanted = seeds_for_power(test.cohens_d, POWER, criterion.power_level) if test.cohens_d else None
    return Comparison(
        condition=name,
        baseline=first,
        seeds=seeds,
        mean=float(np.mean([conditions[name][seed] for seed in seeds])),
        baseline_mean=float(np.mean([conditions[first][seed] for seed in seeds])),
        test=test,
        p_adjusted=criterion.p_adjusted,
        more_seeds=max(1, wanted - len(seeds)) if wanted and verdict == "insufficient_evidence" else None,
        detectable=_detectable(test, len(seeds), criterion.power_level),
        verdict=verdict,
        confidence=criterion.confidence,
    )


def paired_test(differences: Sequence[float], alpha: float = 0.05) -> PairedTest:
    """Run all tests on paired differences."""
    values = np.asarray(differences, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ConfigError("a compared value is not a finite number.")
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return PairedTest(mean, None, None, None, None, None)
    spread = _spread(values)
    permutation_p = sign_flip_p(values)
    if spread == 0:
        # Equal in every seed: t would be infinite, but the sign-flip test still works.
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
    """The standard deviation; 0 when it is only rounding error."""
    spread = float(values.std(ddof=1))
    return 0.0 if spread <= 1e-12 * float(np.abs(values).max()) else spread


def t_interval(differences: Floats, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """Student's t interval of the mean, over the last axis."""
    n = differences.shape[-1]
    half = stats.t.ppf(1 - alpha / 2, n - 1) * differences.std(axis=-1, ddof=1) / math.sqrt(n)
    mean = differences.mean(axis=-1)
    return mean - half, mean + half


def t_p_value(differences: Floats) -> Floats:
    """Two-sided p-value of the paired t-test, over the last axis."""
    result: Floats = stats.ttest_1samp(differences, 0.0, axis=-1).pvalue
    return result


def sign_flip_p(differences: Floats) -> float:
    """Two-sided permutation p-value: exact over all 2^n sign flips up to 13 pairs, else 9999 random ones."""
    if not np.any(differences):
        return 1.0
    result = stats.permutation_test(
        (differences,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def bootstrap_interval(differences: Floats, alpha: float = 0.05, draws: int = BOOTSTRAP_DRAWS) -> Interval | None:
    """Studentized paired bootstrap (Efron & Tibshirani 1993, chapter 12); None where too few values are distinct.

    Each resample's mean is divided by its own standard error, which corrects for the spread that a small resample
    loses. A resample of equal values has none; when these reach into the tails there is no interval.
    """
    low, high = bootstrap_intervals(differences[None], alpha, draws)
    bounds = float(low[0]), float(high[0])
    return bounds if all(map(math.isfinite, bounds)) else None


def bootstrap_intervals(differences: Floats, alpha: float, draws: int) -> tuple[Floats, Floats]:
    """The same for each row of a matrix, with shared resamples; infinite where there is no interval."""
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
    cut = _tail(alpha, draws)
    if not cut:
        return np.full_like(mean, -np.inf), np.full_like(mean, np.inf)
    return mean - ordered[:, draws - cut] * error, mean - ordered[:, cut - 1] * error


def why_no_bootstrap(alpha: float) -> str:
    """Why `bootstrap_interval` gave none."""
    if not _tail(alpha, BOOTSTRAP_DRAWS):
        return f"a level of {alpha:.2g} needs more than its {BOOTSTRAP_DRAWS} resamples"
    return "there are too few distinct differences"


def _tail(alpha: float, draws: int) -> int:
    """The number of resamples in each tail."""
    return int((draws + 1) * alpha / 2)


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: the family-wise error rate stays at alpha."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    adjusted = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, dtype=np.float64)[order] * factors))
    result = np.empty(len(p_values))
    result[order] = adjusted
    return [float(value) for value in result]


def noise_floor(conditions: Conditions) -> NoiseFloor | None:
    """The pooled standard deviation between seeds of a condition; None when no condition has two seeds."""
    groups = [np.array(list(seeds.values()), dtype=np.float64) for seeds in conditions.values() if len(seeds) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return None
    spread = math.sqrt(sum((len(group) - 1) * _spread(group) ** 2 for group in groups) / degrees)
    return NoiseFloor(spread, degrees, float(stats.t.ppf(0.975, degrees)) * math.sqrt(2) * spread)


def compare_problems(before_SP: Floats, after_SP: Floats, alpha: float = 0.05) -> ProblemComparison:
    """Rates of seeds × problems before and after, paired by problem. Valid for these runs, not for other seeds."""
    differences = after_SP.mean(axis=0) - before_SP.mean(axis=0)
    testable = len(differences) > 1 and _spread(differences) > 0
    low, high = t_interval(differences, alpha) if testable else (0.0, 0.0)
    return ProblemComparison(
        problems=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        difference=float(differences.mean()),
        interval=(float(low), float(high)) if testable else None,
        p_value=float(t_p_value(differences)) if testable else None,
    )


def seeds_for_power(effect: float, power: float = POWER, alpha: float = 0.05) -> int | None:
    """The number of paired seeds that detects an effect of `effect` standard deviations; None above a thousand."""
    if _power_of(effect, MAX_SEEDS, alpha) < power:
        return None
    low, high = 2, MAX_SEEDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _power_of(effect, middle, alpha) >= power else (middle + 1, high)
    return low


def _power_of(effect: float, n: int, alpha: float) -> float:
    """Power of a two-sided paired t-test of n seeds.

    Given the estimated standard deviation, the statistic is normal; we average over its distribution. scipy's
    non-central t distribution is the closed form, but returns NaN for large effects.
    """
    limits, centre = special.stdtrit(n - 1, 1 - alpha / 2) * _estimated_spreads(n), abs(effect) * math.sqrt(n)
    return float(np.mean(special.ndtr(centre - limits) + special.ndtr(-centre - limits)))


@lru_cache(maxsize=64)
def _estimated_spreads(n: int) -> Floats:
    """Quantiles of the sample standard deviation of n draws, in units of the true one."""
    result: Floats = np.sqrt(special.chdtri(n - 1, (np.arange(400) + 0.5) / 400) / (n - 1))
    return result


def _detectable(test: PairedTest, n: int, level: float) -> float | None:
    """The difference that n seeds with this spread detect with 80% power."""
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
        raise ConfigError(f"{one} and {other} have no seed in common to pair.  Try: run both with the same seeds")
    return shared


def sequential_test(
    differences: Sequence[float], max_seeds: int, alpha: float = 0.05, comparisons: int = 1
) -> SequentialDecision:
    """Whether a pair of conditions may stop, tested after every seed from the fifth to `max_seeds` in finishing order.

    Each look is a paired t-test at the same lower level, chosen so that all looks together have a false positive rate
    of alpha (Pocock 1977), divided by the number of pairs that are tested, `comparisons`.
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
