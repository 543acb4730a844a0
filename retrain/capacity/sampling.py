"""The rules by which sampling shares the memory of a GPU: how the adapter is merged, and how large the KV cache is.

Imports no torch. The `pytorch` engine follows them, and `retrain plan` predicts with them what the engine will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Merging = Literal["copies", "in-place", "never"]

# Merged copies of the adapted matrices may take this share of the free memory; KV cache and activations need the rest.
COPY_SHARE = 1 / 3
# Parameters from which an adapter is merged in bf16.
LARGE_MODEL = 10**9
# Tokens per block of the paged cache. The decode kernel reads one block per iteration.
BLOCK = 64
# The dense cache of eager decoding grows by this many tokens, so that it is not reallocated for each of them.
DENSE_BLOCK = 128
# Smaller batches cost the same, so they share one graph; rows beyond the largest batch wait.
SMALLEST = 8
LARGEST = 1024
# Few completions reach their limit: if not all would fit at full length, the cache starts with this share of what fits,
# and grows when it runs out.
FIRST_SHARE = 0.4
# Growing copies one layer, and prefills need memory too.
CACHE_SHARE = 0.75
# The logits of a row and what is computed from them.
BYTES_PER_LOGIT = 8


def leaves_unmerged(option: str, parameters: int, width: int) -> bool:
    """Whether `[inference] merge_adapter` leaves the adapter unmerged in a model with weights of `width` bytes.

    In a small bf16 model the rounding of merged weights matters, and decoding is not bound by reading weights.
    """
    return option == "never" or (option == "auto" and width < 4 and parameters < LARGE_MODEL)


def merges_in_place(copies: int, free: int, training: int) -> bool:
    """Whether merged copies of this size would take too much of the free memory, of which training wants a part."""
    return copies > COPY_SHARE * free or copies + training > free


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


def largest_running_batch(vocabulary: int, room: int) -> int:
    """Rows whose logits take at most a quarter of the free memory."""
    return min(max(room // 4 // (vocabulary * BYTES_PER_LOGIT), SMALLEST), LARGEST)


def beside_logits(rows: int, vocabulary: int, room: int) -> int:
    """Bytes that the logits of a running batch leave free."""
    return max(room - rows * vocabulary * BYTES_PER_LOGIT, 0)


def dense_capacity(tokens: int) -> int:
    """Tokens per row of a dense cache that holds this many."""
    return -(-tokens // DENSE_BLOCK) * DENSE_BLOCK


def cache_share(room: int) -> int:
    """Bytes of the free memory that the cache may grow to."""
    return int(CACHE_SHARE * room)


def first_blocks(needed: int, fitting: int, longest: int) -> int:
    """How many blocks to begin with."""
    if needed <= fitting:
        return needed
    return max(int(FIRST_SHARE / CACHE_SHARE * fitting), blocks_for(longest) + 1)


@dataclass(frozen=True)
class Sampler:
    """Options of the engine that its memory depends on."""

    merge_adapter: str = "auto"
    may_merge_in_place: bool = True
    copy_width: int = 0
    """Bytes per weight of merged copies; 0: those of the model."""
    is_paged: bool = True
    """Whether CUDA graphs decode over a paged cache; else a dense one is built for each batch."""
    shares_prompts: bool = True
    prompts_at_once: int = 0
    """Maximum prompts per batch; 0: all."""
    cache_room: int | None = None
    """Bytes that a CPU's cache is planned for; None on a GPU, where it is what is left."""


@dataclass(frozen=True)
class SamplingPlan:
    """What sampling will do with the memory that weights and training state leave."""

    merging: Merging | None
    """How the adapter is merged; None in full fine-tuning, and if another process samples."""
    copies: int
    """Bytes of weights that only sampling uses."""
    cache: int
    """Bytes of the KV cache at its largest, if every completion reaches its limit."""
    logits: int
    """Bytes of the running batch's logits."""
    at_once: int
    """Completions that can be at their limit at the same time; others take turns."""
    fits: bool
    """Whether one completion fits."""
