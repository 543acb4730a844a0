"""Interface of decoders, and prefill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.cache import KVCache, Prefill
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.types import FloatArray, IntArray, Sampling

# Limits of one prefill: prompt tokens, and rows of logits.
PREFILL_TOKENS = 32768
PREFILL_ROWS = 512


@dataclass(frozen=True, eq=False)
class Row:
    """One completion to sample. Its tokens depend on `seed`, `number` and position, not on the batch."""

    prompt: IntArray
    seed: int
    number: int
    """Index among the rows of one request, which share a seed."""
    limit: int
    """Maximum new tokens."""

    @property
    def tokens(self) -> int:
        """Maximum tokens in the cache."""
        return len(self.prompt) + self.limit


@dataclass(frozen=True)
class SampledRow:
    """The sampled tokens of a row, with one value per token."""

    tokens: IntArray
    logprobs: FloatArray
    entropies: FloatArray
    stopped: bool
    """Whether it ended with a stop token, not at its limit."""


class Decoder(Protocol):
    """Samples completions token by token."""

    description: str
    """Printed when a run starts."""

    def draw(self, rows: Sequence[Row], sampling: Sampling, progress: Progress) -> list[SampledRow]:
        """Sample every row, in as many waves as needed."""
        ...

    def release(self) -> None:
        """Release memory."""
        ...

    def sizes(self) -> dict[str, int]:
        """Planned and allocated memory of batches."""
        ...

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Restore the `sizes` of an earlier process; False if memory does not allow it."""
        ...


@runtime_checkable
class RunningBatch(Decoder, Protocol):
    """A decoder with continuous batching."""

    def start(self, sampling: Sampling) -> None:
        """Start an empty batch with these sampling options."""
        ...

    def add(self, rows: Iterable[Row]) -> None:
        """Queue rows."""
        ...

    def advance(self) -> dict[Row, SampledRow]:
        """Decode some tokens; returns the rows that have finished."""
        ...


def prefill(model: SamplingModel, cache: KVCache, rows: Sequence[Row], slots: Tensor, share: bool) -> Tensor:
    """Prefill the rows' prompts into `slots` of the cache; returns the logits of each row's first token.

    With `share`, adjacent rows with the same prompt are prefilled once.
    """
    device = slots.device
    prompts = [(group[0].prompt, len(group)) for group in _by_prompt(rows, share)]
    lengths = [len(prompt) for prompt, _ in prompts]
    copies = torch.tensor([count for _, count in prompts], device=device)
    ids = torch.as_tensor(np.concatenate([prompt for prompt, _ in prompts]), dtype=torch.long).to(device)
    positions = torch.as_tensor(np.concatenate([np.arange(length) for length in lengths])).to(device)
    hidden = model.hidden(ids[None], positions[None], Prefill(cache, lengths, slots, copies))[0]
    last = hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]
    return model.head(last).repeat_interleave(copies, dim=0, output_size=len(rows))


def prefill_batches(rows: Sequence[Row], share: bool) -> Iterator[Sequence[Row]]:
    """Split rows into batches that are prefilled together."""
    start = end = tokens = 0
    for group in _by_prompt(rows, share):
        if end > start and (tokens + len(group[0].prompt) > PREFILL_TOKENS or end + len(group) - start > PREFILL_ROWS):
            yield rows[start:end]
            start, tokens = end, 0
        tokens += len(group[0].prompt)
        end += len(group)
    yield rows[start:end]


def _by_prompt(rows: Sequence[Row], share: bool) -> list[list[Row]]:
    if not share:
        return [[row] for row in rows]
    return [list(group) for _, group in groupby(rows, key=lambda row: row.prompt.tobytes())]
