"""Interface of the decode-step kernels, and the attention that calls them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from retrain.inference_engine.pytorch.cache import Store
from retrain.inference_engine.pytorch.paged import PagedCache
from retrain.inference_engine.pytorch.slots import Slots
from retrain.modeling.attention import Scoring

# Number of programs that keeps every multiprocessor busy; small batches split their sequences to reach it.
PROGRAMS = 512
MAX_SPLITS = 16


class Kernels(Protocol):
    """Kernels of a decode step other than those of the model's layers; kernels.py implements them in Triton."""

    def decode_attention(
        self,
        query: Tensor,
        pair: tuple[Tensor, Tensor],
        stores: tuple[Store, Store],
        table: Tensor,
        cached: Tensor,
        scoring: Scoring,
        splits: int,
    ) -> Tensor:
        """Attention of one new token per row over its blocks of the cache; appends the token to it."""
        ...

    def draw_tokens(self, logits: Tensor, state: Slots, slots: Tensor) -> None:
        """Sample one token for each of `slots` and record it; finished rows are unchanged."""
        ...


class DecodeAttention:
    """Decode attention for the first rows of the cache."""

    def __init__(self, kernels: Kernels, cache: PagedCache, cached: Tensor, size: int) -> None:
        self.kernels, self.cache, self.cached = kernels, cache, cached
        key_heads = next(iter(cache.layers.values()))[0].values.shape[1]
        self.splits = 1
        while self.splits < MAX_SPLITS and size * key_heads * self.splits < PROGRAMS:
            self.splits *= 2

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend over each row up to its new token, which is appended to it.

        The new tokens of all rows are packed like prompts, into one sequence: (1, heads, rows, head size).
        """
        query, key, value = (packed.transpose(0, 2) for packed in (query, key, value))
        stores = self.cache.layers[layer]
        output = self.kernels.decode_attention(
            query, (key, value), stores, self.cache.table, self.cached, scoring, self.splits
        )
        return output.transpose(0, 2)
