"""Sizes of a running batch: how many slots and blocks of the cache are allocated for which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retrain.capacity.sampling import (
    BLOCK,
    LARGEST,
    SMALLEST,
    beside_logits,
    blocks_for,
    cache_share,
    largest_running_batch,
)
from retrain.inference_engine.pytorch.cache import bytes_per_token, does_not_fit
from retrain.inference_engine.pytorch.decoder import Row, by_prompt
from retrain.modeling.policy import Policy

# Free memory fluctuates: a new cache and new graphs pay off only for this many times more rows.
WORTH_GROWING = 1.25


@dataclass(frozen=True)
class BatchShape:
    """Buffer sizes: slots, blocks of the cache, maximum tokens and sampled tokens per slot, and whether seen tokens are
    tracked."""

    rows: int
    blocks: int
    capacity: int
    width: int
    is_penalised: bool

    def holds(self, other: BatchShape) -> bool:
        """Whether every row of the other shape fits here, possibly after waiting."""
        is_long = self.capacity >= other.capacity and self.width >= other.width
        is_large = WORTH_GROWING * min(self.rows / other.rows, self.blocks / other.blocks) >= 1
        # A row must always be able to finish alone.
        is_enough = self.blocks > blocks_for(other.capacity)
        return is_long and is_large and is_enough and self.is_penalised >= other.is_penalised

    def joined(self, other: BatchShape) -> BatchShape:
        """The smallest shape that holds both."""
        return BatchShape(
            max(self.rows, other.rows),
            max(self.blocks, other.blocks),
            max(self.capacity, other.capacity),
            max(self.width, other.width),
            self.is_penalised or other.is_penalised,
        )


def bucket(rows: int, largest: int) -> int:
    """The smallest captured batch size that holds `rows`: 8, 12, 16, 24, 32, 48, … and the largest batch itself."""
    size = SMALLEST
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, largest)


def blocks_needed(rows: Sequence[Row], share: bool) -> int:
    """Blocks for all rows at their limits, plus a spare one per row and the scratch block."""
    blocks = sum(blocks_for(row.tokens) for row in rows)
    for group in by_prompt(rows, share):
        blocks -= (len(group) - 1) * (len(group[0].prompt) // BLOCK)
    return blocks + len(rows) + 1


def rows_that_fit(policy: Policy, room: int) -> int:
    """The largest batch for this much free memory."""
    if policy.device.type != "cuda":
        return LARGEST
    return largest_running_batch(policy.vocabulary, room)


def blocks_that_fit(policy: Policy, rows: int, longest: int, dtype: torch.dtype, room: int) -> int:
    """The number of blocks that fit into `room` bytes with the logits; raises if a row of `longest` tokens does not."""
    if policy.device.type != "cuda":
        return 1 << 30
    each = bytes_per_token(policy, dtype)
    left = beside_logits(rows, policy.vocabulary, room)
    fitting = cache_share(left) // (BLOCK * each)
    if fitting < blocks_for(longest) + 1:
        raise does_not_fit(longest, each, left)
    return fitting
