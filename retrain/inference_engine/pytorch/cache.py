"""A dense KV cache: one row a completion, filled from its prompt's prefill, shrinking as completions finish."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retrain.backends.local.attention import PackedAttention, Scoring, masked_attention, visible

# Rows grow by whole blocks, so that a long completion does not reallocate at each token.
BLOCK = 128


class KVCache:
    """Keys and values of every layer, shaped (rows, heads, capacity, head size), and how full each row is."""

    def __init__(self, layers: int, lengths: Tensor) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.lengths = lengths
        """Tokens in each row."""
        self.longest = int(lengths.max())

    def advance(self) -> None:
        """Make room for one more token in each row; the next `append` of every layer writes it."""
        self.lengths = self.lengths + 1
        self.longest += 1

    def fill(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the prompts' keys and values, already laid out a row a completion."""
        rows, heads, length, size = key.shape
        capacity = -(-(length + 1) // BLOCK) * BLOCK
        for store, new in ((self.keys, key), (self.values, value)):
            room = new.new_zeros(rows, heads, capacity, size)
            room[:, :, :length] = new
            store[layer] = room

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's key and value at the end of each row; returns all of the layer up to the longest row."""
        rows = torch.arange(key.shape[0], device=key.device)
        for store, new in ((self.keys, key), (self.values, value)):
            held = store[layer]
            assert held is not None
            if held.shape[2] < self.longest:
                held = torch.nn.functional.pad(held, (0, 0, 0, BLOCK))
                store[layer] = held
            held[rows, :, self.lengths - 1] = new[:, :, 0]
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return keys[:, :, : self.longest], values[:, :, : self.longest]

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not in `rows`."""
        self.lengths = self.lengths.index_select(0, rows)
        self.longest = int(self.lengths.max())
        for store in (self.keys, self.values):
            store[:] = [held.index_select(0, rows) if held is not None else None for held in store]


class Prefill(PackedAttention):
    """Attention over packed prompts that also fills the cache, each prompt into the rows of its completions."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], copies: int, device: torch.device) -> None:
        super().__init__(lengths, device)
        self.cache = cache
        self.copies = copies

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend within each prompt; what lies right of a short prompt in its row is never visible."""
        rows = [self._pad(part).repeat_interleave(self.copies, dim=0) for part in (key, value)]
        self.cache.fill(layer, *rows)
        return super().attend(layer, query, key, value, scoring)


class Decode:
    """Attention of one new token a row over that row's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Append the new token, then attend over the row up to it."""
        keys, values = self.cache.append(layer, key, value)
        positions = torch.arange(keys.shape[2], device=keys.device)
        sees = visible(self.cache.lengths[:, None] - 1, positions[None, :], scoring.window)
        return masked_attention(query, keys, values, sees[:, None, None, :], scoring)
