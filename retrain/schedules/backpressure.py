"""Back pressure: chooses the batch size of the next step.

The Universal Scalability Law (Gunther 1993) gives the throughput of p concurrent completions:
X(p) = γ p / (1 + σ(p−1) + κ p(p−1)), with contention σ, crosstalk κ and a peak at p* = sqrt((1−σ)/κ).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import numpy as np
from scipy.optimize import nnls

from retrain.config.schema import Backpressure
from retrain.types import JsonObject, StepMetrics

WINDOW = 100
# Steps of each size that are kept beyond the window: the fit needs sizes that are no longer used.
KEPT_PER_SIZE = 4
# The law has three parameters.
LEAST_SIZES = 3
# A step slower than predicted by this factor is limited by memory: it swaps, spills or recomputes.
MEMORY_EXCESS = 1.1

Action = Literal["explore", "hold", "throttle", "increase"]
Regime = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]


class BackPressure(Protocol):
    """Observes steps and recommends a batch size."""

    def observe(self, metrics: StepMetrics) -> None:
        """Record the time and size of a step."""

    def recommend(self, batch_size: int) -> int:
        """The batch size of the next step."""

    def metrics(self) -> StepMetrics:
        """Metrics for the logs."""

    def state_dict(self) -> JsonObject:
        """State for a checkpoint."""

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore the state."""


class NoBackPressure:
    """Keeps the configured batch size."""

    def observe(self, metrics: StepMetrics) -> None:
        """Does nothing: the size is fixed."""

    def recommend(self, batch_size: int) -> int:
        """The same batch size."""
        return batch_size

    def metrics(self) -> StepMetrics:
        """The keys that every run logs, without values."""
        numbers = ("p_star", "sigma", "kappa", "utilization", "throughput")
        return {"bp_action": "off", "bp_regime": "off", **{f"bp_{name}": None for name in numbers}}

    def state_dict(self) -> JsonObject:
        """No state."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        """No state."""


@dataclass(frozen=True)
class USL:
    """A fitted Universal Scalability Law."""

    gamma: float
    """Throughput of a single completion."""
    sigma: float
    kappa: float

    @property
    def p_star(self) -> float:
        """Concurrency of maximum throughput; infinite if it never falls."""
        return math.sqrt((1 - self.sigma) / self.kappa) if self.kappa > 0 else math.inf

    def throughput(self, p: float) -> float:
        """Tokens per second with p concurrent completions."""
        return self.gamma * p / (1 + self.sigma * (p - 1) + self.kappa * p * (p - 1))


def fit_usl(sizes: np.ndarray, throughputs: np.ndarray) -> USL | None:
    """Least squares of p/X(p) = a + s·p + c·p(p−1), with relative residuals; None with too few sizes.

    With a, s, c ≥ 0 it is γ = 1/(a+s), σ = s/(a+s) within 0..1, κ = c/(a+s) ≥ 0. Timing noise is relative, so an
    absolute fit would depend on the slowest sizes alone.
    """
    if len(set(sizes.tolist())) < LEAST_SIZES:
        return None
    costs = sizes / throughputs
    basis = np.stack([np.ones_like(costs), sizes, sizes * (sizes - 1)], axis=1) / costs[:, None]
    # Columns are normalized, or rounding of the p² column would hide the others.
    scale = np.linalg.norm(basis, axis=0)
    solution, _ = nnls(basis / scale, np.ones_like(costs))
    a, s, c = (float(x) for x in solution / scale)
    return USL(1 / (a + s), s / (a + s), c / (a + s)) if a + s > 0 else None


class USLBackPressure:
    """Explores batch sizes, fits the law to their throughput, and stays a margin below its peak."""

    def __init__(self, settings: Backpressure, group_size: int, bytes_per_weight: int = 2) -> None:
        self.settings = settings
        self.group_size = group_size
        self.bytes_per_weight = bytes_per_weight
        self.seen: list[tuple[int, float]] = []
        """(concurrent completions, tokens per second) of the last steps, and of a few of each size before them."""
        self.observed = 0
        self.fresh = True
        """Whether this process has not taken a step yet; the first step loads, compiles and allocates."""
        self.throughput: float | None = None
        self.law: USL | None = None
        self.action: Action = "explore"
        self.ladder = _ladder(settings.min_batch_size, settings.max_batch_size)

    def observe(self, metrics: StepMetrics) -> None:
        """Record a step: its tokens over the time of sampling, scoring and training, without evaluation.

        Tokens are counted rather than completions, whose length changes.
        """
        seconds = [float(metrics[key] or 0.0) for key in ("sample_time_s", "score_time_s", "train_time_s")]
        tokens = float(metrics["tokens_per_s"] or 0.0) * seconds[0]
        self.observed += 1
        fresh, self.fresh = self.fresh, False
        p = int(metrics["batch_size"] or 0) * int(metrics["group_size"] or 0)
        # The moving average is of one size: it restarts when the size changes.
        if not self.seen or self.seen[-1][0] != p:
            self.throughput = None
        if fresh or tokens <= 0 or sum(seconds) <= 0:
            return
        throughput = tokens / sum(seconds)
        decay = self.settings.ema_decay
        before = throughput if self.throughput is None else self.throughput
        self.throughput = decay * before + (1 - decay) * throughput
        self.seen = _newest([*self.seen, (p, throughput)])
        if not self.warming_up:
            sizes, throughputs = np.array(self.seen, dtype=np.float64).T
            self.law = fit_usl(sizes, throughputs) or self.law

    @property
    def warming_up(self) -> bool:
        """Whether batch sizes are still explored: for warmup_steps, and until there are three."""
        few = len({p for p, _ in self.seen}) < min(LEAST_SIZES, len(self.ladder))
        return self.observed < self.settings.warmup_steps or few

    def recommend(self, batch_size: int) -> int:
        """The next size to explore during warm-up, then one close to throttle_margin · p*."""
        if self.warming_up:
            self.action = "explore"
            return self.ladder[max(0, self.observed - 1) % len(self.ladder)]
        low, high = self.settings.min_batch_size, self.settings.max_batch_size
        target = self._target()
        p = batch_size * self.group_size
        chosen = batch_size
        if p > target or p < self.settings.increase_margin * target:
            chosen = high if math.isinf(target) else int(target / self.group_size)
        chosen = min(high, max(low, chosen))
        self.action = "hold" if chosen == batch_size else "increase" if chosen > batch_size else "throttle"
        return chosen

    def _target(self) -> float:
        """The target number of concurrent completions."""
        if self.law is not None:
            return self.settings.throttle_margin * self.law.p_star
        # Two sizes do not determine the law: use the faster one.
        means = {p: np.mean([x for q, x in self.seen if q == p]) for p, _ in self.seen}
        return float(max(means, key=lambda p: means[p])) if means else float(self.ladder[0] * self.group_size)

    @property
    def regime(self) -> Regime:
        """What limits throughput."""
        if self.warming_up or not self.seen or self.law is None or self.throughput is None:
            return "warmup"
        p = self.seen[-1][0]
        if p > self.law.p_star:
            return "retrograde"
        if self.law.throughput(p) > MEMORY_EXCESS * self.throughput:
            return "memory_bound"
        if self.settings.peak_gflops and self.settings.peak_bw_gb_s and self._intensity(p) >= self._ridge():
            return "compute_bound"
        return "optimal"

    def _intensity(self, p: int) -> float:
        """FLOPs per byte of a decoding step: each weight is read once and used in 2 operations per completion."""
        return 2 * p / self.bytes_per_weight

    def _ridge(self) -> float:
        """FLOPs per byte above which compute, not memory bandwidth, is the limit (Williams 2009)."""
        return self.settings.peak_gflops / self.settings.peak_bw_gb_s

    def metrics(self) -> StepMetrics:
        """The law and the action after the last step."""
        law, best = self.law, None
        if law is not None and self.throughput is not None:
            sizes = (self.settings.min_batch_size, self.settings.max_batch_size)
            smallest, largest = (size * self.group_size for size in sizes)
            # A law that only falls, as of noisy steps, has its peak below one completion, where it means nothing.
            best = law.throughput(min(max(law.p_star, smallest), largest))
        return {
            "bp_action": self.action,
            "bp_regime": self.regime,
            "bp_p_star": law.p_star if law is not None and math.isfinite(law.p_star) else None,
            "bp_sigma": law.sigma if law is not None else None,
            "bp_kappa": law.kappa if law is not None else None,
            "bp_utilization": self.throughput / best if best and self.throughput is not None else None,
            "bp_throughput": self.throughput,
        }

    def state_dict(self) -> JsonObject:
        """State for a checkpoint."""
        return {
            "seen": [list(pair) for pair in self.seen],
            "observed": self.observed,
            "throughput": self.throughput,
            "law": asdict(self.law) if self.law is not None else None,
            "action": self.action,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore the state; it is empty if the run had no back pressure."""
        if not state:
            return
        self.seen = [(int(p), float(x)) for p, x in state["seen"]]
        self.observed = state["observed"]
        self.throughput = state["throughput"]
        self.law = USL(**state["law"]) if state["law"] is not None else None
        self.action = state["action"]


def _newest(seen: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The last steps, plus the last few of each size."""
    counts: Counter[int] = Counter()
    kept = []
    for age, (p, throughput) in enumerate(reversed(seen)):
        counts[p] += 1
        if age < WINDOW or counts[p] <= KEPT_PER_SIZE:
            kept.append((p, throughput))
    return kept[::-1]


def _ladder(low: int, high: int) -> list[int]:
    """The sizes to explore: powers of two times the smallest, and the largest."""
    sizes = [low * 2**n for n in range((high // low).bit_length())]
    return sorted({*(size for size in sizes if size <= high), high})
