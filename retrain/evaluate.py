"""Held-out evaluation: pass@1 and unbiased pass@k with a 95% interval, always on the same examples."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from retrain.analysis.change import Z95, pass_at_k, t_quantile
from retrain.data.order import digest_of
from retrain.inference_engine import InferenceEngine
from retrain.rollout import RolloutScorer
from retrain.types import Example, JsonObject, Metric, Sampling, StepMetrics

ROUNDING = 1e-12
PLACE = "in the evaluation on held-out problems"


@dataclass(frozen=True)
class Evaluation:
    """Results of a policy on the held-out examples."""

    correct: tuple[int, ...]
    """Correct completions of each example."""
    counted: tuple[int, ...]
    """Scored completions of each example."""
    k: int
    answers: tuple[tuple[Example, str], ...] = ()
    """Each example with its first completion."""
    sampling_metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Additional metrics of the scorer."""
    sampling: Sampling | None = None
    seconds: float = 0.0
    errors: int = 0
    """Completions whose scoring failed."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code that scored them."""
    problems: str = ""
    """A digest of the examples."""

    @property
    def has_scores(self) -> bool:
        """Whether any completion was scored; without, there are no rates."""
        return any(self.counted)

    @property
    def pass_at_1(self) -> float:
        """Mean share of correct completions; 0 if nothing was scored."""
        return _mean([c / n for c, n in self._scored()])

    @property
    def pass_at_k(self) -> float:
        """Mean probability that one of k completions is correct."""
        return _mean([pass_at_k(n, c, min(self.k, n)) for c, n in self._scored()])

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of pass@1."""
        scored = list(self._scored())
        return rate_interval([c / n for c, n in scored], sum(n for _, n in scored))

    def _scored(self) -> list[tuple[int, int]]:
        return [(c, n) for c, n in zip(self.correct, self.counted, strict=True) if n]

    def metrics(self) -> StepMetrics:
        """Metrics for the step's row."""
        low, high = self.interval if self.has_scores else (None, None)
        return {
            "eval_pass_at_1": self.pass_at_1 if self.has_scores else None,
            "eval_pass_at_k": self.pass_at_k if self.has_scores else None,
            "eval_ci_low": low,
            "eval_ci_high": high,
            "eval_reward_errors": self.errors,
            **{f"eval_{name}": value for name, value in self.sampling_metrics.items()},
        }

    def record(self, step: int) -> JsonObject:
        """A row of eval.jsonl with per-example results, for paired comparisons of runs."""
        return {
            "step": step,
            **self.metrics(),
            "k": self.k,
            **self._setup(),
            "correct": list(self.correct),
            "counted": list(self.counted),
        }

    def _setup(self) -> JsonObject:
        """What it was measured on. Evaluations with different setups are not compared."""
        if self.sampling is None:
            return {}
        options = asdict(self.sampling)
        del options["seed"], options["first"]
        code = {"code": dict(self.code)} if self.code else {}
        return {"problems": self.problems, "sampling": options, **code}


class Evaluator:
    """Evaluates every `every` steps."""

    def __init__(
        self,
        scorer: RolloutScorer,
        examples: Sequence[Example],
        sampling: Sampling,
        every: int,
        k: int,
        code: Mapping[str, str] | None = None,
    ) -> None:
        self.scorer = scorer
        self.code = code or {}
        self.examples = examples
        self.sampling = sampling
        self.every = every
        self.k = k

    @cached_property
    def digest(self) -> str:
        """A digest of the problems; empty if there are no evaluations."""
        return digest_of(self.examples) if self.every else ""

    def due(self, step: int) -> bool:
        """Whether to evaluate before `step`."""
        return self.every > 0 and step % self.every == 0

    def run(self, engine: InferenceEngine) -> Evaluation:
        """Sample and score the held-out examples, with the same seed every time."""
        started = time.perf_counter()
        with self.scorer.failures.during(PLACE):
            rollouts = self.scorer.sample_and_score(engine, self.examples, self.sampling)
        groups = rollouts.groups
        return Evaluation(
            correct=tuple(sum(score.outcome == "right" for score in group.scores_G) for group in groups),
            counted=tuple(sum(score.counts for score in group.scores_G) for group in groups),
            k=self.k,
            answers=tuple((group.example, group.completions_G[0].text) for group in groups),
            sampling_metrics={**self.scorer.reward_metrics(), **rollouts.metrics},
            sampling=self.sampling,
            seconds=time.perf_counter() - started,
            errors=rollouts.errors,
            code=self.code,
            problems=self.digest,
        )


def rate_interval(rates: Sequence[float], completions: int) -> tuple[float, float]:
    """95% interval for the mean of per-example rates, over this many completions in total.

    Completions of one example are correlated, so it is Wilson's interval for the sample size whose binomial variance
    equals the variance between examples, with the t quantile, since that variance is estimated. It is never wider than
    the interval for one completion per example, which has the largest possible variance, and never narrower than that
    for independent completions, since a few examples may be alike by chance.
    """
    count = len(rates)
    if count == 0:
        return 0.0, 1.0
    mean = _mean(rates)
    widest, narrowest = wilson_interval(mean, count), wilson_interval(mean, completions)
    spread = sum((rate - mean) ** 2 for rate in rates) / (count - 1) if count > 1 else 0.0
    # Equal rates may differ by rounding.
    if completions == count or spread <= ROUNDING:
        return widest
    low, high = wilson_interval(mean, count * mean * (1 - mean) / spread, t_quantile(count - 1))
    return min(max(low, widest[0]), narrowest[0]), max(min(high, widest[1]), narrowest[1])


def wilson_interval(mean: float, size: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval for a rate of `size` independent samples."""
    centre = (mean + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * math.sqrt(mean * (1 - mean) / size + z**2 / (4 * size**2))
    # Rounding must not put the mean itself outside when it is 0 or 1.
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
