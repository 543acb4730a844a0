"""What a decoder is asked for, what it gives back, and how prompts are run before it decodes."""

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

# Prompt tokens, and rows whose logits exist at once, of one prefill.
PREFILL_TOKENS = 32768
PREFILL_ROWS = 512


@dataclass(frozen=True, eq=False)
class Row:
    """One completion to draw. What it draws depends on `seed`, `number` and the position in it, not on its batch."""

    prompt: IntArray
    seed: int
    number: int
    """Its place among the rows of one request, which share a seed."""
    limit: int
    """Most tokens it may draw."""

    @property
    def tokens(self) -> int:
        """Most tokens it takes in the cache."""
        return len(self.prompt) + self.limit


@dataclass(frozen=True)
class Drawn:
    """What a row drew, a number a token each."""

    tokens: IntArray
    logprobs: FloatArray
    entropies: FloatArray
    stopped: bool
    """Ended with a stop token, not at its limit."""


class Decoder(Protocol):
    """Draws completions, token by token."""

    description: str
    """How it does so, for the line that a run starts with."""

    def draw(self, rows: Sequence[Row], sampling: Sampling, progress: Progress) -> list[Drawn]:
        """Draw every row, however many of them run at a time."""
        ...

    def release(self) -> None:
        """Give memory back."""
        ...

    def sizes(self) -> dict[str, int]:
        """How much memory batches may take, and what is allocated for them."""
        ...

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Take over what `sizes` gave in an earlier process; False where memory does not allow it."""
        ...


@runtime_checkable
class RunningBatch(Decoder, Protocol):
    """A decoder that takes rows while others run."""

    def start(self, sampling: Sampling) -> None:
        """Begin an empty batch that draws this way."""
        ...

    def add(self, rows: Iterable[Row]) -> None:
        """Let rows wait for a place."""
        ...

    def advance(self) -> dict[Row, Drawn]:
        """Go on for some tokens; gives what rows that finished by now drew."""
        ...


def prefill(model: SamplingModel, cache: KVCache, rows: Sequence[Row], slots: Tensor, share: bool) -> Tensor:
    """Run the rows' prompts into `slots` of the cache; gives the logits of each row's first token.

    With `share`, neighbours of the same prompt have it run once.
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


def in_prefills(rows: Sequence[Row], share: bool) -> Iterator[Sequence[Row]]:
    """Cut rows into stretches that are prefilled together."""
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
