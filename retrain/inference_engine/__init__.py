"""Inference engines: token ids of prompts in, token ids and log-probs of completions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from retrain.types import Completion, IntArray, Sampling, StepMetrics

__all__ = [
    "Deliver",
    "Described",
    "HoldsMemory",
    "IncrementalEngine",
    "InferenceEngine",
    "Measured",
    "Progress",
    "Remote",
    "ResumableSizes",
    "StreamingEngine",
    "Turn",
    "Turns",
]

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total), cheap enough to call often. May raise to cancel: let the exception propagate."""


Deliver = Callable[[int, list[Completion]], None]
"""Called with the index of a prompt and its completions, as soon as all of them are done."""


class InferenceEngine(Protocol):
    """Samples completions from the policy that is being trained."""

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample `sampling.n` completions for each prompt, in order. The same seed gives the same completions."""

    def sync(self, weights: object) -> None:
        """Load the policy's newest weights; an engine that shares them has nothing to do."""

    def shutdown(self) -> None:
        """Release all resources."""


@runtime_checkable
class IncrementalEngine(Protocol):
    """An engine that delivers the completions of a prompt while it samples those of others."""

    def generate_each(
        self, prompts: Sequence[IntArray], sampling: Sampling, deliver: Deliver
    ) -> list[list[Completion]]:
        """Like `generate`; each prompt's completions are also delivered early, in any order, in the caller's thread."""


@runtime_checkable
class Remote(Protocol):
    """An engine outside this process: checked before training and monitored while it samples. It has no entropies."""

    def check(self, sampling: Sampling, log: Callable[[str], None]) -> int:
        """Validate the engine for this run; returns its context length."""

    def metrics(self) -> StepMetrics:
        """Metrics since the last call: `policy_proof`, and the mismatch between its log-probs and the trainer's."""

    def shutdown(self) -> None:
        """Release all resources."""


@runtime_checkable
class Measured(Protocol):
    """An engine whose log-prob mismatch was measured before training."""

    @property
    def mismatch_at_start(self) -> float:
        """Mean difference from the trainer's log-probs under the same weights."""


@dataclass(frozen=True)
class Turn:
    """One prompt of a conversation, and the future for its completion.

    `sampling.n` is 1. Turns of one queue may differ in `max_tokens` and `seed` only. A completion depends on the seed
    and the prompt, not on the rest of the batch.
    """

    prompt_ids: IntArray
    sampling: Sampling
    answer: Future[Completion]


class Turns(Protocol):
    """Queue of turns between conversations and the engine."""

    def take(self, wait: bool) -> list[Turn]:
        """All pending turns. With `wait`, at least one, or none if the queue is closed."""


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that admits new prompts while it samples others; other engines get turns in rounds."""

    def serve(self, turns: Turns) -> None:
        """Sample turns as they arrive and resolve each as soon as it is done, until the queue is closed."""


@runtime_checkable
class ResumableSizes(Protocol):
    """An engine whose batch sizes follow free memory. Rounding depends on them, so a resume restores them."""

    def sizes(self) -> dict[str, int]:
        """Sizes to save."""

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Restore these sizes; False if memory does not allow it."""


@runtime_checkable
class HoldsMemory(Protocol):
    """An engine that keeps memory between batches which training on the same device could use."""

    def release_memory(self) -> None:
        """Free it; the next batch allocates it again, which takes time."""


@runtime_checkable
class Described(Protocol):
    """An engine with a one-line description of where and how it samples."""

    @property
    def description(self) -> str:
        """Printed when a run starts."""
