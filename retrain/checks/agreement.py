"""Whether sampler and trainer agree on every row: a row whose log-probs do not fit its tokens has a wrong gradient.

Log-probs that agree with the trainer's on every token are those of a sample of the policy, up to a ratio within the
tolerance. So whatever was altered on the way, one log-prob, one token, the prompt or the weights, either shows here or
is no larger than what rounding does. A few rows that disagree are left out of the loss; more of them stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from retrain.errors import RolloutError
from retrain.types import BoolArray, Datum, FloatArray, IntArray, StepMetrics

# Share of a step's rows that may be left out before the step is refused; one row always may.
MOST_EXCLUDED = 0.05
# How far beyond the median row a row stands out, where the sampler is noisier than its tolerance. Seen under drift: 5.
SPREAD = 10.0
# Mean ratio of all tokens: 1 where both sides are one policy, whatever the noise. Standard errors that are allowed.
RATIO_LIMIT, RATIO_ERRORS = 0.02, 5.0


class DisagreementError(RolloutError):
    """Too many rows of a step have log-probs that are not the policy's; nothing was trained on them."""

    def __init__(self, message: str, is_whole: bool = True) -> None:
        super().__init__(message)
        self.is_whole = is_whole
        """Whether the backend still holds the state from before the step."""


@dataclass(frozen=True)
class Tolerance:
    """Differences of log-probs that are rounding: of one token, and of a long row's mean."""

    largest: float
    mean: float
    ceiling: bool = True
    """Whether the weights are the same on both sides, so that noise has an upper limit as well."""

    @property
    def with_drift(self) -> Tolerance:
        """For rows that older weights have sampled."""
        return Tolerance(max(self.largest, DRIFT.largest), max(self.mean, DRIFT.mean), ceiling=False)

    @property
    def most(self) -> Tolerance:
        """What no noise explains, however much of it the other rows have."""
        return Tolerance(3.0 * self.largest, 3.0 * self.mean) if self.ceiling else Tolerance(math.inf, math.inf)

    def at(self, temperature: float) -> Tolerance:
        """For a sampling temperature: below 1, it divides logits and their rounding."""
        times = 1.0 / min(1.0, temperature) if temperature > 0 else 1.0
        return Tolerance(times * self.largest, times * self.mean, self.ceiling)


# Measured: float32 1e-5 to 1e-3 at most; bf16 0.001 on average and up to 0.3 at one token of 65,000 (a 4B model, H200);
# an fp8 cache or fp8 weights 0.005 to 0.007 on average.
FLOAT32 = Tolerance(0.02, 0.005)
HALF = Tolerance(0.7, 0.05)
EIGHT_BITS = Tolerance(1.0, 0.1)
# Other weights, or dropout: what is sound follows from the rows. A learning rate of 1e-4 moves single tokens by 0.1.
DRIFT = Tolerance(0.5, 0.1, ceiling=False)


@dataclass(frozen=True)
class Gaps:
    """How far the sampler's log-probs are from the trainer's, one entry a row."""

    groups: IntArray
    indices: IntArray
    tokens: IntArray
    mean: FloatArray
    largest: FloatArray

    @classmethod
    def of(cls, datums: Sequence[Datum], sums: FloatArray) -> Gaps:
        """From (rows, 3): tokens compared, the sum of |Δ|, and the largest."""
        table = np.asarray(sums, np.float64).reshape(-1, 3)
        groups = np.array([datum.group for datum in datums], np.int64)
        return cls.from_table(np.column_stack([groups, [datum.index for datum in datums], table]))

    @classmethod
    def from_table(cls, table: FloatArray) -> Gaps:
        """From (rows, 5): group, completion, tokens compared, the sum of |Δ|, and the largest."""
        tokens = table[:, 2]
        mean = table[:, 3] / np.maximum(tokens, 1)
        return cls(table[:, 0].astype(int), table[:, 1].astype(int), tokens.astype(int), mean, table[:, 4])

    @classmethod
    def between(cls, datums: Sequence[Datum], own: Sequence[FloatArray]) -> Gaps:
        """Of rows whose log-probs under the trainer are given."""
        rows = []
        for datum, own_T in zip(datums, own, strict=True):
            gap = np.abs(own_T.astype(np.float64) - datum.logprobs_T)[compared(datum)]
            rows.append([len(gap), gap.sum(), gap.max(initial=0.0)])
        return cls.of(datums, np.array(rows).reshape(-1, 3))

    def joined(self, other: Gaps) -> Gaps:
        """Both, one after the other."""
        return Gaps(*(np.concatenate([mine, theirs]) for mine, theirs in zip(self._arrays, other._arrays, strict=True)))

    @property
    def table(self) -> FloatArray:
        """(rows, 5), as `from_table` takes it."""
        return np.column_stack([self.groups, self.indices, self.tokens, self.mean * self.tokens, self.largest])

    @property
    def _arrays(self) -> tuple[FloatArray | IntArray, ...]:
        return self.groups, self.indices, self.tokens, self.mean, self.largest

    @property
    def sampled(self) -> BoolArray:
        """Rows with anything to compare; one that belongs to no group has log-probs that the caller made up."""
        return (self.tokens > 0) & (self.groups >= 0)

    @property
    def are_all_sampled(self) -> bool:
        """Whether no row was made up."""
        return not ((self.tokens > 0) & (self.groups < 0)).any()

    def disagreeing(self, tolerance: Tolerance) -> BoolArray:
        """Rows that differ by more than rounding, and by far more than the median row."""
        there = self.sampled
        if not there.any():
            return there
        most = tolerance.most
        usual_largest, usual_mean = (float(np.median(values[there])) for values in (self.largest, self.mean))
        largest = min(most.largest, max(tolerance.largest, SPREAD * usual_largest))
        mean = min(most.mean, max(tolerance.mean, SPREAD * usual_mean))
        # The mean of a few tokens scatters more than that of many.
        off: BoolArray = (self.largest > largest) | (self.mean > mean * (1 + 8 / np.sqrt(np.maximum(self.tokens, 1))))
        return off & there


@dataclass(frozen=True)
class Finding:
    """What a comparison of a step's rows came to."""

    gaps: Gaps
    off: BoolArray
    trained: int
    """How many of the rows, the first ones, are trained on; the others were only looked at."""
    shift: float = 0.0
    """By how much the mean ratio of all tokens is off 1, where that is no chance."""

    @cached_property
    def left_out(self) -> BoolArray:
        """Which of the rows that are trained on are left out: whole groups, whose advantages rest on every reward."""
        groups, off = self.gaps.groups[: self.trained], self.off[: self.trained]
        return np.isin(groups, groups[off])

    @property
    def excluded(self) -> int:
        """How many they are."""
        return int(self.left_out.sum())

    @property
    def refused(self) -> bool:
        """Whether the step must not be applied."""
        return int(self.off.sum()) > max(1, int(MOST_EXCLUDED * self.gaps.sampled.sum())) or bool(self.shift)

    @cached_property
    def worst(self) -> int:
        """The row that differs most, among those that are off if there are any."""
        return int(np.argmax(np.where(self.off, self.gaps.largest + 1e6, self.gaps.largest)))

    @property
    def place(self) -> str:
        """What to call that row in a message."""
        return f"group {self.gaps.groups[self.worst]}, completion {self.gaps.indices[self.worst]}"

    def metrics(self) -> StepMetrics:
        """How many rows were compared and left out, and the largest difference of all."""
        there = self.gaps.sampled
        largest = float(self.gaps.largest[there].max()) if there.any() else None
        return {"rows_checked": int(there.sum()), "rows_excluded": self.excluded, "rows_mismatch_max": largest}

    def describe(self) -> str:
        """The rows that are off, and the worst of them, in one sentence."""
        gaps, at, rows = self.gaps, self.worst, int(self.off.sum())
        return (
            f"the sampler's log-probs of {rows} of {len(self.off)} rows are not the trainer's: {self.place} is "
            f"{gaps.largest[at]:.3g} off at one token and {gaps.mean[at]:.3g} on average over {gaps.tokens[at]} tokens"
        )

    def cause(self) -> str:
        """What it looks like."""
        gaps, at = self.gaps, self.worst
        if self.off.mean() > 0.5 or not self.off.any():
            return "other weights, another temperature or other cuts on the sampler's side than were asked for"
        if gaps.tokens[at] > 1 and gaps.largest[at] > 0.8 * gaps.mean[at] * gaps.tokens[at]:
            return "one log-prob or one token id that was altered on its way"
        return "token ids that were altered, or the completion of another prompt"

    def error(self, is_whole: bool = True) -> DisagreementError:
        """What stops the run."""
        what = self.describe()
        if not self.off.any():
            what = f"the sampler's log-probs are shifted as a whole: the mean ratio is {1 + self.shift:.3f}, not 1"
        return DisagreementError(
            f"{what}. It looks like {self.cause()}. Nothing was trained on this step.  "
            "Try: see what stands between the sampler and the trainer, restart the server, and resume",
            is_whole,
        )


class Agreement:
    """Compares the rows of each step, within the tolerance of the sampler's precision."""

    def __init__(self, tolerance: Tolerance, say: Callable[[str], None]) -> None:
        self.tolerance = tolerance
        self.say = say

    def judge(self, trained: Gaps, looked_at: Gaps | None, staleness: int) -> Finding:
        """Which rows are off; with samples of older weights only those that stand out from the rest."""
        tolerance = self.tolerance if not staleness else self.tolerance.with_drift
        gaps = trained if looked_at is None else trained.joined(looked_at)
        finding = Finding(gaps, gaps.disagreeing(tolerance), len(trained.tokens))
        if finding.off.any() and not finding.refused:
            left_out = f"the {finding.excluded} rows of its group are left out of the loss"
            fate = left_out if finding.excluded else "not part of the loss in any case"
            self.say(f"Warning: {finding.describe()}; {fate}. It looks like {finding.cause()}.")
        return finding

    def shift(self, told: StepMetrics, tokens: float, staleness: int) -> float:
        """By how much the mean ratio is off 1, beyond chance; 0 where it is not, or cannot be known."""
        ratio, kl = told["ratio_mean"], told["kl_sample_train"]
        if staleness or not self.tolerance.ceiling or ratio is None or kl is None:
            return 0.0
        # For small differences the variance of the ratio is twice the divergence.
        error = math.sqrt(2 * max(float(kl), 0.0) / max(tokens, 1.0))
        off = float(ratio) - 1.0
        return off if abs(off) > RATIO_LIMIT + RATIO_ERRORS * error else 0.0


def compared(datum: Datum) -> BoolArray:
    """The tokens of a row that sampler and trainer must agree on."""
    return datum.mask_T if datum.check_T is None else datum.check_T


def unsignalled(datums: Sequence[Datum], trained_tokens: int, seed: int) -> list[Datum]:
    """Some rows that are not trained on, drawn at random: at least one, and about a hundredth of what is trained."""
    chosen: list[Datum] = []
    left = trained_tokens / 100
    for at in np.random.default_rng(seed).permutation(len(datums)):
        if chosen and (left <= 0 or len(chosen) == 16):
            break
        chosen.append(datums[int(at)])
        left -= len(chosen[-1].prompt_ids) + len(chosen[-1].completion_ids_T)
    return chosen
