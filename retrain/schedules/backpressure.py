"""Back pressure: who decides the next step's batch size.

The Universal Scalability Law (Gunther 1993) gives the throughput of p completions at a time:
X(p) = γ p / (1 + σ(p−1) + κ p(p−1)), with contention σ, crosstalk κ and a peak at p* = sqrt((1−σ)/κ).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from scipy.optimize import nnls

from retrain.config.schema import Backpressure
from retrain.types import StepMetrics

WINDOW = 100
# Steps of every size that are kept beyond the window: a law that forgot the sizes it left could not be fitted any more.
KEPT_PER_SIZE = 4
# The law has three parameters.
LEAST_SIZES = 3
# A step this much slower than the law says waits for memory: it swaps, spills or recomputes.
MEMORY_EXCESS = 1.1

Action = Literal["explore", "hold", "throttle", "increase"]
Regime = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]


class BackPressure(Protocol):
    """Watches steps and recommends a batch size."""

    def observe(self, metrics: StepMetrics) -> None:
        """A step took this long over this many completions."""
        ...

    def recommend(self, batch_size: int) -> int:
        """The batch size of the next step."""
        ...

    def metrics(self) -> StepMetrics:
        """What it thinks, for the logs."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All of its memory, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that memory."""
        ...


class NoBackPressure:
    """Keeps the batch size that the configuration asks for."""

    def observe(self, metrics: StepMetrics) -> None:
        """Nothing to learn."""

    def recommend(self, batch_size: int) -> int:
        """The same again."""
        return batch_size

    def metrics(self) -> StepMetrics:
        """The keys every run logs, empty."""
        numbers = ("p_star", "sigma", "kappa", "utilization", "throughput")
        return {"bp_action": "off", "bp_regime": "off", **{f"bp_{name}": None for name in numbers}}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class USL:
    """A fitted law."""

    gamma: float
    """Throughput of one completion at a time."""
    sigma: float
    kappa: float

    @property
    def p_star(self) -> float:
        """Where throughput peaks; infinite when it never falls."""
        return math.sqrt((1 - self.sigma) / self.kappa) if self.kappa > 0 else math.inf

    def throughput(self, p: float) -> float:
        """Tokens a second with p completions at a time."""
        return self.gamma * p / (1 + self.sigma * (p - 1) + self.kappa * p * (p - 1))


def fit_usl(sizes: np.ndarray, throughputs: np.ndarray) -> USL | None:
    """Least squares of p/X(p) = a + s·p + c·p(p−1), each residual relative to its value; None if it says nothing.

    With a, s, c ≥ 0 it is γ = 1/(a+s), σ = s/(a+s) within 0..1, κ = c/(a+s) ≥ 0. Timing noise is relative, so an
    absolute fit would listen to the slowest sizes alone.
    """
    if len(set(sizes.tolist())) < LEAST_SIZES:
        return None
    costs = sizes / throughputs
    basis = np.stack([np.ones_like(costs), sizes, sizes * (sizes - 1)], axis=1) / costs[:, None]
    # Columns of one length, or the square of p would drown the rest in rounding.
    scale = np.linalg.norm(basis, axis=0)
    solution, _ = nnls(basis / scale, np.ones_like(costs))
    a, s, c = (float(x) for x in solution / scale)
    return USL(1 / (a + s), s / (a + s), c / (a + s)) if a + s > 0 else None


class USLBackPressure:
    """Explores batch sizes, fits the law to what they gave, and keeps a margin below its peak."""

    def __init__(self, settings: Backpressure, group_size: int, bytes_per_weight: int = 2) -> None:
        self.settings = settings
        self.group_size = group_size
        self.bytes_per_weight = bytes_per_weight
        self.seen: list[tuple[int, float]] = []
        """(completions at a time, tokens a second) of the last steps, and of a few of each size before them."""
        self.observed = 0
        self.fresh = True
        """Whether this process has not taken a step yet; the first one loads, compiles and allocates."""
        self.throughput: float | None = None
        self.law: USL | None = None
        self.action: Action = "explore"
        self.ladder = _ladder(settings.min_batch_size, settings.max_batch_size)

    def observe(self, metrics: StepMetrics) -> None:
        """Take note of a step: its tokens over the time that sampling, scoring and training took.

        Evaluation is not part of that time, and tokens, not completions, are counted, for answers change their length.
        """
        seconds = [float(metrics[key] or 0.0) for key in ("sample_time_s", "score_time_s", "train_time_s")]
        tokens = float(metrics["tokens_per_s"] or 0.0) * seconds[0]
        self.observed += 1
        fresh, self.fresh = self.fresh, False
        if fresh or tokens <= 0 or sum(seconds) <= 0:
            return
        p = int(metrics["batch_size"] or 0) * int(metrics["group_size"] or 0)
        throughput = tokens / sum(seconds)
        same_size = bool(self.seen) and self.seen[-1][0] == p and self.throughput is not None
        decay = self.settings.ema_decay
        # The running mean is of one size: it begins anew where the size changes.
        self.throughput = decay * (self.throughput or 0.0) + (1 - decay) * throughput if same_size else throughput
        self.seen = _newest([*self.seen, (p, throughput)])
        if not self.warming_up:
            sizes, throughputs = np.array(self.seen, dtype=np.float64).T
            self.law = fit_usl(sizes, throughputs) or self.law

    @property
    def warming_up(self) -> bool:
        """Whether batch sizes are still being explored: for warmup_steps, and until three were seen."""
        few = len({p for p, _ in self.seen}) < min(LEAST_SIZES, len(self.ladder))
        return self.observed < self.settings.warmup_steps or few

    def recommend(self, batch_size: int) -> int:
        """The next rung while warming up, then a step towards throttle_margin · p*, if it is worth one."""
        if self.warming_up:
            self.action = "explore"
            return self.ladder[max(0, self.observed - 1) % len(self.ladder)]
        low, high = self.settings.min_batch_size, self.settings.max_batch_size
        aim = self._aim()
        p = batch_size * self.group_size
        chosen = batch_size
        if p > aim or p < self.settings.increase_margin * aim:
            chosen = high if math.isinf(aim) else int(aim / self.group_size)
        chosen = min(high, max(low, chosen))
        self.action = "hold" if chosen == batch_size else "increase" if chosen > batch_size else "throttle"
        return chosen

    def _aim(self) -> float:
        """The completions to have at a time."""
        if self.law is not None:
            return self.settings.throttle_margin * self.law.p_star
        # Two sizes fit no curve; the one that was faster will do.
        means = {p: np.mean([x for q, x in self.seen if q == p]) for p, _ in self.seen}
        return float(max(means, key=lambda p: means[p])) if means else float(self.ladder[0] * self.group_size)

    @property
    def regime(self) -> Regime:
        """What holds throughput where it is."""
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
        """Operations a byte of one decoding step: each weight is read once, and used in 2 operations a completion."""
        return 2 * p / self.bytes_per_weight

    def _ridge(self) -> float:
        """Operations a byte above which the hardware's arithmetic, not its memory, is the limit (Williams 2009)."""
        return self.settings.peak_gflops / self.settings.peak_bw_gb_s

    def metrics(self) -> StepMetrics:
        """What it thinks after the last step: the action chose the next batch size."""
        law, best = self.law, None
        if law is not None and self.throughput is not None:
            largest = self.settings.max_batch_size * self.group_size
            best = law.throughput(min(law.p_star, largest))
        return {
            "bp_action": self.action,
            "bp_regime": self.regime,
            "bp_p_star": law.p_star if law is not None and math.isfinite(law.p_star) else None,
            "bp_sigma": law.sigma if law is not None else None,
            "bp_kappa": law.kappa if law is not None else None,
            "bp_utilization": self.throughput / best if best and self.throughput is not None else None,
            "bp_throughput": self.throughput,
        }

    def state_dict(self) -> dict[str, Any]:
        """All of its memory, for a checkpoint."""
        return {
            "seen": [list(pair) for pair in self.seen],
            "observed": self.observed,
            "throughput": self.throughput,
            "law": asdict(self.law) if self.law is not None else None,
            "action": self.action,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that memory; a run that had no back pressure left none."""
        if not state:
            return
        self.seen = [(int(p), float(x)) for p, x in state["seen"]]
        self.observed = state["observed"]
        self.throughput = state["throughput"]
        self.law = USL(**state["law"]) if state["law"] is not None else None
        self.action = state["action"]


def _newest(seen: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The last steps, and the last few of each size."""
    counts: Counter[int] = Counter()
    kept = []
    for age, (p, throughput) in enumerate(reversed(seen)):
        counts[p] += 1
        if age < WINDOW or counts[p] <= KEPT_PER_SIZE:
            kept.append((p, throughput))
    return kept[::-1]


def _ladder(low: int, high: int) -> list[int]:
    """The sizes to explore: doubling from the smallest, and the largest."""
    rungs = [low * 2**n for n in range((high // low).bit_length())]
    return sorted({*(rung for rung in rungs if rung <= high), high})
