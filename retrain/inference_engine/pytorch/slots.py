"""Slots of a running batch: state and sampled tokens of the row in each slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retrain.inference_engine.pytorch.decoder import Row, SampledRow


class Slots:
    """Tensors with one row per slot, at fixed addresses, updated by kernels without host synchronization.

    `done` is 0 while a slot's row is running, 1 after a stop token, 2 at its limit; an empty slot counts as done.
    """

    def __init__(self, rows: int, width: int, stops: tuple[int, ...], seen: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.width = width
        self.tokens = zeros(rows, width)
        self.logprobs, self.entropies = (zeros(rows, width, dtype=torch.float32) for _ in range(2))
        self.drawn, self.cached, self.limits, self.numbers = (zeros(rows) for _ in range(4))
        self.done = torch.ones(rows, dtype=torch.int32, device=device)
        self.seeds, self.next_token = (zeros(rows, dtype=torch.int64) for _ in range(2))
        self.seen = zeros(rows, seen, dtype=torch.bool)
        """Tokens that occur in each row, for the repetition penalty."""
        self.everyone = torch.arange(rows, device=device)
        self.temperature = zeros(1, dtype=torch.float32)
        padding = (-1,) * ((1 << max(len(stops) - 1, 0).bit_length()) - len(stops)) if stops else (-1,)
        self.stops = torch.tensor((*stops, *padding), dtype=torch.int32, device=device)

    @property
    def state(self) -> list[Tensor]:
        """All per-slot state."""
        state = [self.tokens, self.logprobs, self.entropies, self.drawn, self.cached, self.limits, self.numbers]
        return [*state, self.done, self.seeds, self.next_token, self.seen]

    def admit(self, slots: Tensor, rows: Sequence[Row]) -> None:
        """Assign rows whose prompts are in the cache; sampling their first token counts the last prompt token."""

        def column(values: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(slots.device)

        self.cached[slots] = column([len(row.prompt) - 1 for row in rows], torch.int32)
        self.limits[slots] = column([row.limit for row in rows], torch.int32)
        self.numbers[slots] = column([row.number for row in rows], torch.int32)
        self.seeds[slots] = column([row.seed for row in rows], torch.int64)
        self.drawn[slots], self.done[slots], self.seen[slots] = 0, 0, False
        if self.seen.shape[1]:
            for slot, row in zip(slots.tolist(), rows, strict=True):
                self.seen[slot, torch.as_tensor(row.prompt, device=slots.device)] = True

    def poll(self, size: int) -> tuple[list[int], list[int]]:
        """Done flags and sampled lengths of the first `size` slots. Synchronizes with the device."""
        done, drawn = torch.stack((self.done[:size], self.drawn[:size])).tolist()
        return done, drawn

    def take_finished(self, slots: Sequence[int], lengths: Sequence[int], stopped: Sequence[bool]) -> list[SampledRow]:
        """The sampled rows of finished slots, which are freed."""
        at = torch.tensor(slots, device=self.tokens.device)
        tokens, logprobs, entropies = (
            part[at, : max(lengths)].cpu().numpy() for part in (self.tokens, self.logprobs, self.entropies)
        )
        self.free(at)
        return [
            SampledRow(tokens[i, :length], logprobs[i, :length], entropies[i, :length], stopped[i])
            for i, length in enumerate(lengths)
        ]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move rows to other slots; their old slots are freed."""
        for held in self.state:
            held[target] = held[source]
        self.free(source)

    def free(self, slots: Tensor) -> None:
        """Free slots. They are still computed, which is cheap since no cache is read for them."""
        self.done[slots], self.cached[slots] = 1, 0

    def copy_from(self, old: Slots) -> None:
        """Copy the state of a smaller set of slots."""
        self.temperature.copy_(old.temperature)
        for own, other in zip(self.state, old.state, strict=True):
            own[tuple(slice(length) for length in other.shape)].copy_(other)
