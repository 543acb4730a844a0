"""Backends: where the weights live and learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retrain.inference_engine import InferenceEngine, Progress
from retrain.types import Datum, StepMetrics

if TYPE_CHECKING:
    from retrain.config import TrainConfig

__all__ = ["Backend", "Capabilities", "Closes", "FrozenModel", "LendsFrozen", "ReportsLate"]


@dataclass(frozen=True)
class Capabilities:
    """What the rest of the run needs to know about a backend."""

    context_length: int
    """Most tokens of prompt and completion together."""
    gives_entropies: bool
    """Whether completions carry true entropies."""
    reports_late: bool = False
    """Whether `train_step` returns before its step has finished: what it says of the loss is of the step before. Such a
    backend is also a `ReportsLate`, or the rows before its checkpoints hold the step before's numbers."""
    checks_rows: bool = False
    """Whether `train_step` compares the log-probs of rows that have a `check_T` with its own."""
    sampled_logprobs: bool = True
    """Whether log-probs are of the distribution that was sampled from, so that they tell how likely a repeat was."""


class Backend(Protocol):
    """Trains the policy and lends an engine that samples from it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend is and gives."""
        ...

    def sampler(self, step: int) -> InferenceEngine:
        """An engine that holds the weights which `step` is to be sampled from."""
        ...

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimiser step over all datums; none leaves the weights as they are. Returns loss, grad_norm, ratios."""
        ...

    def save(self, path: Path) -> None:
        """Write all that a resume needs into the empty folder `path`; `path`/adapter has the adapter in PEFT layout."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        ...


@runtime_checkable
class ReportsLate(Protocol):
    """A backend whose `train_step` returns while its step is under way."""

    def settle(self) -> StepMetrics:
        """Wait for the step under way; gives what `train_step` would have said of it, had it waited."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A backend that holds something outside this process, or a thread."""

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Let go of it; called once, however the run ends: None is the kind of end one hopes for."""
        ...


@dataclass(frozen=True)
class FrozenModel:
    """A model that is sampled from and never trained."""

    engine: InferenceEngine
    """What it draws for a prompt depends on the seed and the prompt alone, not on the prompt's place in the batch."""
    context_length: int


@runtime_checkable
class LendsFrozen(Protocol):
    """A backend that also samples from a frozen model beside the policy."""

    def frozen(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The model of `[teaching] student_model`; where that is empty, the weights that the policy started from."""
        ...
