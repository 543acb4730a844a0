"""Backends: own the weights, train them, and provide an engine that samples from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from retrain.inference_engine import InferenceEngine, Progress
from retrain.types import Datum, Obstacle, StepMetrics

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.modeling.tokens import Tokenizer

__all__ = [
    "AsyncBackend",
    "Backend",
    "Capabilities",
    "Closeable",
    "FrozenModel",
    "FrozenModelProvider",
    "OverlappingBackend",
]


@dataclass(frozen=True)
class Capabilities:
    """Properties of a backend that the rest of the run depends on."""

    context_length: int
    """Maximum tokens of prompt and completion together."""
    gives_entropies: bool
    """Whether completions carry true entropies."""
    reports_late: bool = False
    """Whether `train_step` returns before its step has finished and reports the previous step. Such a backend should be
    an `AsyncBackend`; otherwise the last row before a checkpoint keeps the previous step's numbers."""
    checks_rows: bool = False
    """Whether `train_step` compares the log-probs of rows that have a `check_T` with its own."""
    sampled_logprobs: bool = True
    """Whether log-probs are those of the sampled distribution, so that they give the probability of a repeat."""


class Backend(Protocol):
    """Trains the policy and provides an engine that samples from it."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties of this backend."""

    def sampler(self, step: int) -> InferenceEngine:
        """An engine with the weights that `step` is sampled from."""

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimizer step over all datums; without datums the weights stay unchanged.

        All returned metrics are logged; `loss`, `grad_norm`, `ratio_mean`, `ratio_max` and `kl_sample_train` are
        expected.
        """

    def save(self, path: Path) -> None:
        """Write the state for a resume into the empty folder `path`; the PEFT adapter goes to `path`/adapter."""

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""


@runtime_checkable
class AsyncBackend(Protocol):
    """A backend whose `train_step` returns while its step is still running."""

    def settle(self) -> StepMetrics:
        """Wait for the running step; returns its metrics."""


@runtime_checkable
class OverlappingBackend(Protocol):
    """A backend that can compute the gradients of some groups while others of the same step are still being sampled."""

    def overlap_obstacle(self) -> Obstacle | None:
        """Why this run cannot do so, or should not; None if it should."""

    def accumulate(self, part: int, datums: Sequence[Datum]) -> None:
        """Compute the gradients of some rows of the next `train_step`, which gets all rows; the weights do not change.

        Returns at once. Parts come in any order and are summed by their numbers, which start at 0. Rows may have
        another `group` in `train_step`, but the same arrays.
        """

    def discard_parts(self) -> None:
        """Drop these gradients: there will be no such `train_step`."""


@runtime_checkable
class Closeable(Protocol):
    """A backend that holds threads or resources outside this process."""

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Release them; called once, however the run ends. `ended_by` is None after a regular end."""


@dataclass(frozen=True)
class FrozenModel:
    """A model that is sampled from but never trained."""

    engine: InferenceEngine
    """Completions depend on the seed and the prompt only, not on the position in the batch."""
    context_length: int


@runtime_checkable
class FrozenModelProvider(Protocol):
    """A backend that can also sample from a frozen model."""

    def frozen(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The model of `[teaching] student_model`; if empty, the policy's initial weights."""
