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
from retrain.inference_engine.pytorch.cache import Fillable, Placement, Prefill
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


def prefill(model: SamplingModel, cache: Fillable, groups: Sequence[Sequence[Row]], where: Placement) -> Tensor:
    """Prefill the prompt of each group into the cache; returns the logits of each row's first token."""
    device = where.target.device
    lengths = [len(group[0].prompt) for group in groups]
    copies = torch.tensor([len(group) for group in groups], device=device)
    ids = torch.as_tensor(np.concatenate([group[0].prompt for group in groups]), dtype=torch.long).to(device)
    positions = torch.as_tensor(np.concatenate([np.arange(length) for length in lengths])).to(device)
    hidden = model.hidden(ids[None], positions[None], Prefill(cache, lengths, where))[0]
    last = hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]
    return model.head(last).repeat_interleave(copies, dim=0, output_size=sum(map(len, groups)))


def prefill_batches(rows: Sequence[Row], share: bool) -> Iterator[list[list[Row]]]:
    """Groups of rows with the same prompt, in batches that are prefilled together."""
    batch: list[list[Row]] = []
    tokens = count = 0
    for group in by_prompt(rows, share):
        tokens, count = tokens + len(group[0].prompt), count + len(group)
        if batch and (tokens > PREFILL_TOKENS or count > PREFILL_ROWS):
            yield batch
            batch, tokens, count = [], len(group[0].prompt), len(group)
        batch.append(group)
    yield batch


def by_prompt(rows: Sequence[Row], share: bool) -> list[list[Row]]:
    """Adjacent rows with the same prompt; without `share`, each row on its own."""
    if not share:
        return [[row] for row in rows]
    return [list(group) for _, group in groupby(rows, key=lambda row: row.prompt.tobytes())]
