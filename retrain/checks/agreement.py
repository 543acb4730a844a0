"""Checks that sampler and trainer agree on every row: wrong log-probs produce wrong gradients.

An altered log-prob, token, prompt or weight shows up as a difference between the sampler's and the trainer's
log-probs, or is no larger than rounding. A few mismatched rows are excluded from the loss; more of them stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from retrain.errors import RolloutError
from retrain.types import BoolArray, Datum, FloatArray, IntArray, StepMetrics

# Fraction of a step's rows that may be excluded before the step is rejected; a single row always may be.
MOST_EXCLUDED = 0.05
# Multiple of the median gap that counts as an outlier when the sampler is noisier than its tolerance. Drift reaches 5.
SPREAD = 10.0
# The mean ratio of all tokens is 1 for the same policy, whatever the noise: allowed deviation, and standard errors.
RATIO_LIMIT, RATIO_ERRORS = 0.02, 5.0


class DisagreementError(RolloutError):
    """Too many rows of a step have log-probs that do not match the policy; nothing was trained on them."""

    def __init__(self, message: str, state_intact: bool = True) -> None:
        super().__init__(message)
        self.state_intact = state_intact
        """Whether the backend still has the state from before the step."""


@dataclass(frozen=True)
class Tolerance:
    """Log-prob differences that rounding explains: for one token, and for the mean of a long row."""

    largest: float
    mean: float
    ceiling: bool = True
    """Whether both sides have the same weights, which bounds the noise."""

    @property
    def with_drift(self) -> Tolerance:
        """The tolerance for rows sampled from older weights."""
        return Tolerance(max(self.largest, DRIFT.largest), max(self.mean, DRIFT.mean), ceiling=False)

    @property
    def most(self) -> Tolerance:
        """The limit beyond which no noise explains a gap."""
        return Tolerance(3.0 * self.largest, 3.0 * self.mean) if self.ceiling else Tolerance(math.inf, math.inf)

    def at(self, temperature: float) -> Tolerance:
        """Scaled for a sampling temperature below 1, which divides logits and their rounding errors."""
        times = 1.0 / min(1.0, temperature) if temperature > 0 else 1.0
        return Tolerance(times * self.largest, times * self.mean, self.ceiling)


# Measured: float32 1e-5 to 1e-3 at most; bf16 0.001 on average and up to 0.3 at one token of 65,000 (a 4B model, H200);
# an fp8 cache or fp8 weights 0.005 to 0.007 on average.
FLOAT32 = Tolerance(0.02, 0.005)
HALF = Tolerance(0.7, 0.05)
EIGHT_BITS = Tolerance(1.0, 0.1)
# Older weights, or dropout: the limits follow the median row. A learning rate of 1e-4 moves single tokens by 0.1.
DRIFT = Tolerance(0.5, 0.1, ceiling=False)


@dataclass(frozen=True)
class LogprobGaps:
    """Differences between the sampler's and the trainer's log-probs, one entry per row."""

    groups: IntArray
    indices: IntArray
    tokens: IntArray
    mean: FloatArray
    largest: FloatArray

    @classmethod
    def of(cls, datums: Sequence[Datum], sums: FloatArray) -> LogprobGaps:
        """Gaps from an array (rows, 3): tokens compared, the sum of |Δ|, and the largest."""
        table = np.asarray(sums, np.float64).reshape(-1, 3)
        groups = np.array([datum.group for datum in datums], np.int64)
        return cls.from_table(np.column_stack([groups, [datum.index for datum in datums], table]))

    @classmethod
    def from_table(cls, table: FloatArray) -> LogprobGaps:
        """Gaps from an array (rows, 5): group, completion, tokens compared, the sum of |Δ|, and the largest."""
        tokens = table[:, 2]
        mean = table[:, 3] / np.maximum(tokens, 1)
        return cls(table[:, 0].astype(int), table[:, 1].astype(int), tokens.astype(int), mean, table[:, 4])

    @classmethod
    def between(cls, datums: Sequence[Datum], own: Sequence[FloatArray]) -> LogprobGaps:
        """Gaps between the log-probs of the datums and `own`, the trainer's log-probs of each row."""
        rows = []
        for datum, own_T in zip(datums, own, strict=True):
            gap = np.abs(own_T.astype(np.float64) - datum.logprobs_T)[compared(datum)]
            rows.append([len(gap), gap.sum(), gap.max(initial=0.0)])
        return cls.of(datums, np.array(rows).reshape(-1, 3))

    def joined(self, other: LogprobGaps) -> LogprobGaps:
        """Both, concatenated."""
        return LogprobGaps(
            *(np.concatenate([mine, theirs]) for mine, theirs in zip(self._arrays, other._arrays, strict=True))
        )

    @property
    def table(self) -> FloatArray:
        """(rows, 5), as `from_table` takes it."""
        return np.column_stack([self.groups, self.indices, self.tokens, self.mean * self.tokens, self.largest])

    @property
    def _arrays(self) -> tuple[FloatArray | IntArray, ...]:
        return self.groups, self.indices, self.tokens, self.mean, self.largest

    @property
    def sampled(self) -> BoolArray:
        """Rows with tokens to compare; rows without a group have synthetic log-probs."""
        return (self.tokens > 0) & (self.groups >= 0)

    @property
    def are_all_sampled(self) -> bool:
        """Whether no row is synthetic."""
        return not ((self.tokens > 0) & (self.groups < 0)).any()

    def disagreeing(self, tolerance: Tolerance) -> BoolArray:
        """Rows that differ by more than rounding, and by much more than the median row."""
        there = self.sampled
        if not there.any():
            return there
        most = tolerance.most
        usual_largest, usual_mean = (float(np.median(values[there])) for values in (self.largest, self.mean))
        largest = min(most.largest, max(tolerance.largest, SPREAD * usual_largest))
        mean = min(most.mean, max(tolerance.mean, SPREAD * usual_mean))
        # The mean of a few tokens has a larger variance.
        mismatched: BoolArray = (self.largest > largest) | (
            self.mean > mean * (1 + 8 / np.sqrt(np.maximum(self.tokens, 1)))
        )
        return mismatched & there


@dataclass(frozen=True)
class AgreementReport:
    """The result of comparing a step's rows."""

    gaps: LogprobGaps
    mismatched: BoolArray
    trained: int
    """Number of trained rows, which come first; the others are only checked."""
    shift: float = 0.0
    """Deviation of the mean ratio of all tokens from 1, if significant; else 0."""
    is_stale: bool = False
    """Whether the rows were sampled from older weights."""

    @cached_property
    def excluded_rows(self) -> BoolArray:
        """Trained rows to exclude: complete groups, since advantages depend on every reward of a group."""
        groups, mismatched = self.gaps.groups[: self.trained], self.mismatched[: self.trained]
        return np.isin(groups, groups[mismatched])

    @property
    def excluded(self) -> int:
        """Number of excluded rows."""
        return int(self.excluded_rows.sum())

    @property
    def rejected(self) -> bool:
        """Whether the step must not be applied."""
        return int(self.mismatched.sum()) > max(1, int(MOST_EXCLUDED * self.gaps.sampled.sum())) or bool(self.shift)

    @cached_property
    def worst(self) -> int:
        """Index of the row with the largest gap, among the mismatched rows if there are any."""
        return int(np.argmax(np.where(self.mismatched, self.gaps.largest + 1e6, self.gaps.largest)))

    @property
    def worst_row(self) -> str:
        """That row's name in messages."""
        return f"group {self.gaps.groups[self.worst]}, completion {self.gaps.indices[self.worst]}"

    def metrics(self) -> StepMetrics:
        """Rows compared, rows excluded, and the largest difference."""
        there = self.gaps.sampled
        largest = float(self.gaps.largest[there].max()) if there.any() else None
        return {"rows_checked": int(there.sum()), "rows_excluded": self.excluded, "rows_mismatch_max": largest}

    def summary(self) -> str:
        """One sentence on the mismatched rows and the worst of them."""
        gaps, at, rows = self.gaps, self.worst, int(self.mismatched.sum())
        return (
            f"the sampler's log-probs of {rows} of {len(self.mismatched)} rows do not match the trainer's: "
            f"{self.worst_row} is off by {gaps.largest[at]:.3g} at one token and by {gaps.mean[at]:.3g} on average "
            f"over {gaps.tokens[at]} tokens"
        )

    def likely_cause(self) -> str:
        """The most likely cause, besides a large update if the samples are older than it."""
        update = "an update that changed the policy much ([training] lr), or " if self.is_stale else ""
        return update + self._cause_in_transit()

    def _cause_in_transit(self) -> str:
        gaps, at = self.gaps, self.worst
        if self.mismatched.mean() > 0.5 or not self.mismatched.any():
            return "a sampler with other weights, temperature or top-k/top-p settings than requested"
        if gaps.tokens[at] > 1 and gaps.largest[at] > 0.8 * gaps.mean[at] * gaps.tokens[at]:
            return "one log-prob or one token id that was altered in transit"
        return "token ids that were altered, or the completion of another prompt"

    def error(self, state_intact: bool = True) -> DisagreementError:
        """The error that stops the run."""
        what = self.summary()
        if not self.mismatched.any():
            what = f"all of the sampler's log-probs are shifted: the mean ratio is {1 + self.shift:.3f}, not 1"
        advice = "check what lies between the sampler and the trainer, restart the server, and resume"
        if self.is_stale:
            advice = f"a smaller [training] lr, if one update may have changed the policy that much; otherwise {advice}"
        return DisagreementError(
            f"{what}. It looks like {self.likely_cause()}. Nothing was trained on this step.  Try: {advice}",
            state_intact,
        )


class Agreement:
    """Compares the rows of each step, with a tolerance for the sampler's precision."""

    def __init__(self, tolerance: Tolerance, log: Callable[[str], None]) -> None:
        self.tolerance = tolerance
        self.log = log

    def check(self, trained: LogprobGaps, checked: LogprobGaps | None, staleness: int) -> AgreementReport:
        """Find mismatched rows; with samples of older weights, only outliers."""
        tolerance = self.tolerance if not staleness else self.tolerance.with_drift
        gaps = trained if checked is None else trained.joined(checked)
        report = AgreementReport(gaps, gaps.disagreeing(tolerance), len(trained.tokens), is_stale=staleness > 0)
        if report.mismatched.any() and not report.rejected:
            excluded = f"the {report.excluded} rows of its group are excluded from the loss"
            outcome = excluded if report.excluded else "it is not part of the loss"
            self.log(f"Warning: {report.summary()}; {outcome}. It looks like {report.likely_cause()}.")
        return report

    def shift(self, metrics: StepMetrics, tokens: float, staleness: int) -> float:
        """Deviation of the mean ratio from 1 if significant; 0 if it is not, or cannot be determined."""
        ratio, kl = metrics["ratio_mean"], metrics["kl_sample_train"]
        if staleness or not self.tolerance.ceiling or ratio is None or kl is None:
            return 0.0
        # For small differences the variance of the ratio is twice the KL divergence.
        error = math.sqrt(2 * max(float(kl), 0.0) / max(tokens, 1.0))
        deviation = float(ratio) - 1.0
        return deviation if abs(deviation) > RATIO_LIMIT + RATIO_ERRORS * error else 0.0


def compared(datum: Datum) -> BoolArray:
    """The tokens of a row that sampler and trainer must agree on."""
    return datum.mask_T if datum.check_T is None else datum.check_T


def sample_unsignalled(datums: Sequence[Datum], trained_tokens: int, seed: int) -> list[Datum]:
    """A random sample of untrained rows: 1 to 16, until they have 1% as many tokens as are trained on."""
    chosen: list[Datum] = []
    left = trained_tokens / 100
    for at in np.random.default_rng(seed).permutation(len(datums)):
        if chosen and (left <= 0 or len(chosen) == 16):
            break
        chosen.append(datums[int(at)])
        left -= len(chosen[-1].prompt_ids) + len(chosen[-1].completion_ids_T)
    return chosen
