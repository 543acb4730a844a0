"""Inference engines: prompts in as token ids, completions out as token ids with the log-prob of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from retrain.types import Completion, IntArray, Sampling, StepMetrics

__all__ = [
    "Described",
    "InferenceEngine",
    "KeepsSizes",
    "Measured",
    "Progress",
    "Remote",
    "ServesTurns",
    "Turn",
    "Turns",
]

Progress = Callable[[str, int, int], None]
"""Called with a phase, how much of it is done, and how much there is; cheap enough to call often."""


class InferenceEngine(Protocol):
    """Samples completions of the policy that is being trained."""

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Draw `sampling.n` completions for each prompt, in order. The same seed draws the same ones."""
        ...

    def sync(self, weights: object) -> None:
        """Take over the policy's newest weights; an engine that shares them has nothing to do."""
        ...

    def shutdown(self) -> None:
        """Free what the engine holds."""
        ...


@runtime_checkable
class Remote(Protocol):
    """An engine outside this process: checked before training, watched while it samples. It knows no entropies."""

    def check(self, sampling: Sampling, say: Callable[[str], None]) -> int:
        """Refuse what is not fit for the run; gives the most tokens of prompt and completion together."""
        ...

    def metrics(self) -> StepMetrics:
        """What was seen since this was asked last: `policy_proof` and how far its log-probs are from the trainer's."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine whose distance from the trainer was measured before training."""

    @property
    def mismatch_at_start(self) -> float:
        """Mean difference of its log-probs from the trainer's, under the same weights."""
        ...


@dataclass(frozen=True)
class Turn:
    """One prompt of a conversation, and where its single completion is to be put.

    `sampling.n` is 1. Turns of one queue may differ in `max_tokens` and `seed`; everything else is the same. What is
    drawn depends on the seed and the prompt alone, not on who else is in the batch.
    """

    prompt_ids: IntArray
    sampling: Sampling
    answer: Future[Completion]


class Turns(Protocol):
    """The queue between conversations and the engine that samples their turns."""

    def take(self, wait: bool) -> list[Turn]:
        """Every turn that is pending. With `wait`, at least one, or none once no more will ever come."""
        ...


@runtime_checkable
class ServesTurns(Protocol):
    """An engine that takes new prompts while it is sampling others; every other engine is given turns in rounds."""

    def serve(self, turns: Turns) -> None:
        """Sample turns as they come, each answered as soon as it is done, until no more will come."""
        ...


@runtime_checkable
class KeepsSizes(Protocol):
    """An engine whose batches follow free memory. Rounding depends on their sizes, so a resume takes them over."""

    def sizes(self) -> dict[str, int]:
        """The sizes to continue with."""
        ...

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Continue with these sizes; False where memory does not allow it."""
        ...


@runtime_checkable
class Described(Protocol):
    """An engine that can say in one line where and how it samples."""

    @property
    def description(self) -> str:
        """That line, printed when a run starts."""
        ...
