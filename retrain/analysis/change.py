"""How much a run has changed between two of its own evaluations, problem by problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.data.order import is_same_digest

Row = Mapping[str, Any]
"""A row of eval.jsonl or metrics.jsonl."""

SETUP = ("problems", "sampling", "code")
Z95 = statistics.NormalDist().inv_cdf(0.975)
T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)
"""The 97.5% quantile of Student's t for 1 to 5 degrees of freedom, where its expansion is too small."""


@dataclass(frozen=True)
class Change:
    """pass@1, or pass@k, of the problems that both evaluations scored, and the 95% interval of the difference."""

    before: float
    after: float
    low: float
    high: float
    problems: int

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def is_noise(self) -> bool:
        """Whether the interval includes no change."""
        return self.low <= 0.0 <= self.high


def comparable(evaluations: Sequence[Row]) -> list[Row]:
    """The evaluations on the same problems, with the same sampling and rewards as the last one; a resume may change
    them."""
    return [row for row in evaluations if not find_other_setup(row, evaluations[-1])]


def scored(evaluations: Iterable[Row]) -> list[Row]:
    """Comparable evaluations with a rate; there is none if no completion could be scored."""
    return comparable([row for row in evaluations if isinstance(row.get("eval_pass_at_1"), int | float)])


def find_other_setup(one: Row, last: Row) -> list[str]:
    """In what an evaluation is not like a later one, of `SETUP`. Older versions did not store all of it."""
    found = [key for key in SETUP if key in one and one[key] != last.get(key)]
    return [key for key in found if key == "sampling" or not _have_same_digests(one[key], last.get(key))]


def _have_same_digests(one: object, other: object) -> bool:
    """Whether two digests, or digests by name, are the same; older ones are of less."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same_digest(one[name], other[name]) for name in one)
    return isinstance(one, str) and isinstance(other, str) and is_same_digest(one, other)


def paired_change(first: Row, last: Row, k: int = 1) -> Change | None:
    """The mean difference of pass@k over problems that both evaluations scored; None for fewer than two.

    Also None for rows without the results of each problem. Both evaluate the same problems, so the difficulty of a
    problem does not count as noise.
    """
    rates = [_rates(row, k) for row in (first, last)]
    if len(rates[0]) != len(rates[1]):
        return None
    pairs = [(one, other) for one, other in zip(*rates, strict=True) if one is not None and other is not None]
    count = len(pairs)
    if count < 2:
        return None
    before, after = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    mean = after - before
    spread = sum((other - one - mean) ** 2 for one, other in pairs)
    # As if one more completion had changed: a few problems that all change alike do not make a result certain.
    samples = max(*first["counted"], *last["counted"])
    unit = min(k, samples) / samples
    half = t_quantile(count - 1) * math.sqrt((spread + unit**2) / (count - 1) / count)
    return Change(before, after, max(-1.0, mean - half), min(1.0, mean + half), count)


def noise_between(one: Sequence[float], other: Sequence[float]) -> float:
    """Half of the 95% interval of the difference of two means, each with its own spread (Welch 1947)."""
    errors = [statistics.variance(values) / len(values) for values in (one, other)]
    if not any(errors):
        return 0.0
    pairs = zip(errors, (one, other), strict=True)
    degrees = sum(errors) ** 2 / sum(error**2 / (len(values) - 1) for error, values in pairs)
    return t_quantile(int(degrees)) * math.sqrt(sum(errors))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def _rates(row: Row, k: int) -> list[float | None]:
    pairs = zip(row.get("correct") or (), row.get("counted") or (), strict=False)
    return [None if not n else c / n if k == 1 else pass_at_k(n, c, min(k, n)) for c, n in pairs]


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t by its expansion in 1/degrees; scipy would take a second to load."""
    if degrees <= len(T95):
        return T95[degrees - 1]
    z = Z95
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + (z**3 + z) / (4 * degrees) + second / degrees**2
