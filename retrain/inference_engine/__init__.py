"""Inference engines: prompts in as token ids, completions out as token ids with the log-prob of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from retrain.types import Completion, IntArray, Sampling

__all__ = ["InferenceEngine", "Progress"]

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
