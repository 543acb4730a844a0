"""A paged KV cache: blocks of tokens, and a list of blocks for each slot of the running batch.

A slot holds blocks only for the tokens it has, so memory limits the number of cached tokens, not the length of the
longest completion. The full blocks of a prompt are shared by the completions of its group. Block 0 is a scratch block:
slots without a row write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.capacity.sampling import BLOCK, blocks_for
from retrain.inference_engine.pytorch.cache import Placement, Store, pack

SCRATCH = 0


@dataclass(frozen=True)
class Group:
    """Slots that are filled with the same prompt."""

    length: int
    slots: Sequence[int]


class PagedCache:
    """Keys and values of every layer, (blocks, heads, BLOCK, head size), and the table of each slot's blocks.

    `table` is on the device, at a fixed address; `upload` writes what changed.
    """

    def __init__(self, rows: int, blocks: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.blocks, self.dtype, self.device = blocks, dtype, device
        self.layers: dict[int, tuple[Store, Store]] = {}
        self.free = list(range(blocks - 1, SCRATCH, -1))
        self.users = [0] * blocks
        self.held: list[list[int]] = [[] for _ in range(rows)]
        """Blocks of each slot, in order."""
        # One more column: a step that is only run to capture it may write past a row's end.
        self._table = np.full((rows, blocks_for(capacity) + 1), SCRATCH, np.int32)
        self.table = torch.from_numpy(self._table).to(device, copy=True)
        self._is_changed = False

    def place(self, groups: Sequence[Group]) -> Placement:
        """Allocate blocks for prompts; full blocks are shared within each group."""
        width = blocks_for(max(group.length for group in groups))
        source, target = [], []
        for index, group in enumerate(groups):
            full = [self._take() for _ in range(group.length // BLOCK)]
            source += [index * width + at for at in range(len(full))]
            target += full
            for copy, slot in enumerate(group.slots):
                for block in full if copy else ():
                    self.users[block] += 1
                own = list(full)
                if group.length % BLOCK:
                    own.append(self._take())
                    source.append(index * width + len(full))
                    target.append(own[-1])
                self._assign(slot, own)
        return Placement(torch.tensor(source, device=self.device), torch.tensor(target, device=self.device))

    def fill(self, layer: int, pair: tuple[Tensor, Tensor], where: Placement) -> None:
        """Store prompts' keys and values (prompts, heads, tokens, size) in the placed blocks.

        Positions after the end of a prompt in its last block are never attended to.
        """
        for store, new in zip(self._layer(layer, pair), pair, strict=True):
            for held, part in zip(store.parts, pack(new, self.dtype).parts, strict=True):
                rest = (0, 0) * (part.dim() - 3)
                padded = F.pad(part, (*rest, 0, -part.shape[2] % BLOCK))
                blocks = padded.reshape(*part.shape[:2], -1, BLOCK, *part.shape[3:]).transpose(1, 2).flatten(0, 1)
                held[where.target] = blocks[where.source]

    def reserve(self, slot: int, tokens: int) -> bool:
        """Take blocks until the slot holds `tokens`; False if there are too few, and then nothing changes."""
        missing = blocks_for(tokens) - len(self.held[slot])
        if missing > len(self.free):
            return False
        if missing > 0:
            self._assign(slot, [*self.held[slot], *(self._take() for _ in range(missing))])
        return True

    def release(self, slot: int) -> None:
        """Return the blocks of a slot that no other slot uses."""
        for block in self.held[slot]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        self._assign(slot, [])

    def move(self, source: int, target: int) -> None:
        """Give the blocks of a slot to an empty one."""
        self._assign(target, self.held[source])
        self._assign(source, [])

    def swap_out(self, slot: int) -> list[Tensor]:
        """Copy the blocks of a slot to the host and release them."""
        at = torch.tensor(self.held[slot], device=self.device)
        saved = [held.index_select(0, at).cpu() for held in self._parts()]
        self.release(slot)
        return saved

    def swap_in(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Copy saved blocks into newly taken ones of an empty slot."""
        self._assign(slot, [self._take() for _ in range(len(saved[0]))])
        at = torch.tensor(self.held[slot], device=self.device)
        for held, part in zip(self._parts(), saved, strict=True):
            held[at] = part.to(self.device)

    def grow(self, rows: int, blocks: int, capacity: int) -> None:
        """Grow layer by layer, so that two full caches never exist at once."""

        def larger(held: Tensor) -> Tensor:
            room = held.new_zeros(blocks, *held.shape[1:])
            room[: len(held)] = held
            return room

        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (keys.each(larger), values.each(larger))
        self.free[:0] = range(blocks - 1, self.blocks - 1, -1)
        self.users += [0] * (blocks - self.blocks)
        self.blocks = blocks
        old = self._table
        self.held += [[] for _ in range(rows - len(self.held))]
        self._table = np.full((rows, blocks_for(capacity) + 1), SCRATCH, np.int32)
        self._table[: len(old), : old.shape[1]] = old
        self.table = torch.from_numpy(self._table).to(self.device, copy=True)

    def upload(self) -> None:
        """Write the table to the device, if it has changed."""
        if self._is_changed:
            self.table.copy_(torch.from_numpy(self._table))
            self._is_changed = False

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for part in self._parts())

    def _parts(self) -> list[Tensor]:
        return [part for pair in self.layers.values() for store in pair for part in store.parts]

    def _take(self) -> int:
        block = self.free.pop()
        self.users[block] = 1
        return block

    def _assign(self, slot: int, blocks: list[int]) -> None:
        self.held[slot] = blocks
        self._table[slot] = SCRATCH
        self._table[slot, : len(blocks)] = blocks
        self._is_changed = True

    def _layer(self, layer: int, pair: tuple[Tensor, Tensor]) -> tuple[Store, Store]:
        if layer not in self.layers:
            keys, values = (
                pack(new[:1, :, :1], self.dtype).each(
                    lambda held: held.new_zeros(self.blocks, held.shape[1], BLOCK, *held.shape[3:])
                )
                for new in pair
            )
            self.layers[layer] = (keys, values)
        return self.layers[layer]
