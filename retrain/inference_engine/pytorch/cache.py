"""A dense KV cache, one row per completion, and PyTorch attention over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from retrain.capacity.sampling import cache_share, dense_capacity
from retrain.errors import SamplingMemoryError
from retrain.modeling.attention import PackedAttention, Scoring, masked_attention, visible
from retrain.modeling.policy import Policy
from retrain.modeling.quantization import INT8_MAX, LEAST_SCALE
from retrain.runtime.devices import cache_memory

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class Store:
    """Keys or values of one layer: (rows, heads, capacity, head size).

    fp8 is stored as bytes, since few operations support it; int8 has a scale per token and head.
    """

    values: Tensor
    scales: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Store:
        """Apply a change to values and scales."""
        return Store(change(self.values), change(self.scales) if self.scales is not None else None)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors; their leading dimensions are (rows, heads, capacity)."""
        return [self.values] if self.scales is None else [self.values, self.scales]


def pack(new: Tensor, dtype: torch.dtype) -> Store:
    """Convert keys or values to the cache's precision."""
    if dtype == FP8:
        return Store(new.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8))
    if dtype == torch.int8:
        scales = (new.float().abs().amax(-1) / INT8_MAX).clamp_min(LEAST_SCALE)
        return Store((new.float() / scales[..., None] + 0.5).floor().to(torch.int8), scales)
    return Store(new.to(dtype))


def unpack(store: Store, dtype: torch.dtype) -> Tensor:
    """Convert stored keys or values to the compute precision."""
    if store.values.dtype == torch.uint8:
        return store.values.view(FP8).to(dtype)
    if store.scales is None:
        return store.values.to(dtype)
    return (store.values.float() * store.scales[..., None]).to(dtype)


@dataclass(frozen=True)
class Placement:
    """Mapping of prompts to the cache: item `source` of a prefill is stored at `target`."""

    source: Tensor
    target: Tensor


class KVCache:
    """Keys and values of every layer. A layer is allocated when its first keys arrive."""

    def __init__(self, rows: int, capacity: int, dtype: torch.dtype) -> None:
        self.rows, self.capacity, self.dtype = rows, capacity, dtype
        self.layers: dict[int, tuple[Store, Store]] = {}

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for pair in self.layers.values() for store in pair for part in store.parts)

    def fill(self, layer: int, pair: tuple[Tensor, Tensor], where: Placement) -> None:
        """Store prompts' keys and values (prompts, heads, tokens, size) in rows.

        Padding to the right of a short prompt is never visible.
        """
        for store, new in zip(self._layer(layer, pair), pair, strict=True):
            for held, part in zip(store.parts, pack(new, self.dtype).parts, strict=True):
                held[where.target, :, : part.shape[2]] = part[where.source]

    def append(self, layer: int, pair: tuple[Tensor, Tensor], at: Tensor) -> None:
        """Write one token's key and value at position `at` of each row."""
        rows = torch.arange(len(at), device=at.device)
        for store, new in zip(self.layers[layer], pair, strict=True):
            for held, part in zip(store.parts, pack(new, self.dtype).parts, strict=True):
                held[rows, :, at] = part[:, :, 0]

    def read(self, layer: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of every row."""
        keys, values = (unpack(store.each(lambda held: held[:, :, :length]), dtype) for store in self.layers[layer])
        return keys, values

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not in `rows`."""
        self.rows = len(rows)
        self._change(lambda held: held.index_select(0, rows))

    def grow(self, rows: int, capacity: int) -> None:
        """Grow layer by layer, so that two full caches never exist at once."""

        def larger(held: Tensor) -> Tensor:
            room = held.new_zeros(rows, held.shape[1], capacity, *held.shape[3:])
            room[: held.shape[0], :, : held.shape[2]] = held
            return room

        self.rows, self.capacity = rows, capacity
        self._change(larger)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (keys.each(change), values.each(change))

    def _layer(self, layer: int, pair: tuple[Tensor, Tensor]) -> tuple[Store, Store]:
        if layer not in self.layers:
            keys, values = (
                pack(new[:1, :, :1], self.dtype).each(
                    lambda held: held.new_zeros(self.rows, held.shape[1], self.capacity, *held.shape[3:])
                )
                for new in pair
            )
            self.layers[layer] = (keys, values)
        return self.layers[layer]


class Fillable(Protocol):
    """A cache that prompts are prefilled into."""

    def fill(self, layer: int, pair: tuple[Tensor, Tensor], where: Placement) -> None:
        """Store prompts' keys and values (prompts, heads, tokens, size)."""
        ...


class Prefill(PackedAttention):
    """Attention over packed prompts that also fills the cache of their completions."""

    def __init__(self, cache: Fillable, lengths: Sequence[int], where: Placement) -> None:
        super().__init__(lengths, where.target.device)
        self.cache, self.where = cache, where

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend within each prompt."""
        self.cache.fill(layer, (self._pad(key), self._pad(value)), self.where)
        return super().attend(layer, query, key, value, scoring)


class Decode:
    """Attention of one new token per row over that row's cache."""

    def __init__(self, cache: KVCache, lengths: Tensor, longest: int) -> None:
        self.cache, self.lengths, self.longest = cache, lengths, longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Append the new token, then attend over the row up to it."""
        self.cache.append(layer, (key, value), self.lengths - 1)
        keys, values = self.cache.read(layer, self.longest, query.dtype)
        positions = torch.arange(self.longest, device=query.device)
        sees = visible(self.lengths[:, None] - 1, positions[None, :], scoring.window)
        # Query heads of one key head are treated as positions, so keys are not repeated.
        rows, heads, _, size = query.shape
        grouped = query.reshape(rows, keys.shape[1], heads // keys.shape[1], size)
        return masked_attention(grouped, keys, values, sees[:, None, None, :], scoring).reshape(rows, heads, 1, -1)


def bytes_per_token(policy: Policy, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers, stored as `dtype`."""
    numbers = policy.cache_bytes_per_token // policy.dtype.itemsize
    if dtype != torch.int8:
        return numbers * dtype.itemsize
    settings = policy.causal_lm.config.get_text_config()
    heads = settings.to_dict().get("num_key_value_heads") or settings.num_attention_heads
    return numbers + 2 * policy.layers * int(heads) * torch.float32.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now; on a CPU, the part of the machine's memory that may be used."""
    if device.type != "cuda":
        return cache_memory()
    # Free on the device, not total minus ours: another process may share it.
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def rows_that_fit(policy: Policy, tokens: int, dtype: torch.dtype, room: int) -> int:
    """The number of rows of `tokens` tokens that fit into `room` bytes of free memory."""
    each, tokens = bytes_per_token(policy, dtype), dense_capacity(tokens)
    # Moving rows copies one layer, and logits need memory too.
    fitting = cache_share(room) // (tokens * each)
    if fitting < 1:
        raise does_not_fit(tokens, each, room)
    return fitting


def does_not_fit(tokens: int, each: int, room: int) -> SamplingMemoryError:
    """The error for a completion of `tokens` tokens, at `each` bytes per token, that does not fit into `room`."""
    return SamplingMemoryError(
        f"the KV cache of one completion does not fit: {tokens} tokens × {each / 1024:.0f} KiB per token = "
        f"{tokens * each / 2**30:.2f} GiB, and the cache may take {cache_share(room) / 2**30:.2f} GiB.  "
        'Try: a smaller max_tokens, or [inference] kv_cache_dtype = "int8"'
    )
