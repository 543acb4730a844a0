"""Decoding on a GPU: one CUDA graph per batch size, replayed for every token without host synchronization.

A step embeds, runs the layers with our attention over a paged KV cache, samples, and leaves the token where the next
step reads it. Every few steps the host polls: finished rows retire, waiting rows are admitted, blocks of the cache are
reserved for the next steps, and when none wait the batch is compacted into a smaller graph. If blocks run out, the rows
admitted last are swapped to the host and continue, unchanged, when others have finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from retrain.capacity.sampling import BLOCK, SMALLEST, blocks_for, first_blocks
from retrain.errors import SamplingMemoryError
from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.ahead import compile_ahead
from retrain.inference_engine.pytorch.batch_shape import (
    WORTH_GROWING,
    BatchShape,
    blocks_needed,
    blocks_that_fit,
    bucket,
    rows_that_fit,
)
from retrain.inference_engine.pytorch.cache import free_memory
from retrain.inference_engine.pytorch.decode_step import DecodeAttention, Kernels
from retrain.inference_engine.pytorch.decoder import Row, SampledRow, prefill, prefill_batches
from retrain.inference_engine.pytorch.paged import Group, PagedCache
from retrain.inference_engine.pytorch.slots import Slots
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.compiling import varying_tokens
from retrain.modeling.distribution import shape_logits
from retrain.types import Sampling

# Steps between polls for finished rows.
POLL_EVERY = 16
# How many times a batch is restarted with less memory before an out-of-memory error ends the run.
RESTARTS = 4
# Large enough for kernels that suit real batches.
WARM_UP_ROWS = 24


@dataclass(frozen=True)
class _Swapped:
    """A row that waits on the host for free blocks."""

    row: Row
    left: int
    state: list[Tensor]
    blocks: list[Tensor]


class GraphDecoder:
    """Continuous batching over static buffers and the CUDA graphs captured over them.

    `start`, then `add` rows at any time and `advance` while it `is_busy`; `draw` does so for a list of rows.
    """

    def __init__(
        self, model: SamplingModel, kernels: Kernels, cache: torch.dtype, share: bool, description: str
    ) -> None:
        self.model, self.kernels, self.cache_dtype, self.share, self.description = (
            model,
            kernels,
            cache,
            share,
            description,
        )
        self.filters = Sampling(max_tokens=0)
        self.temperature = 1.0
        self.waiting: deque[Row] = deque()
        self.running: list[Row | None] = []
        self.left: dict[Row, int] = {}
        """Maximum remaining steps of each running row, in the order of admission."""
        self.swapped: deque[_Swapped] = deque()
        self.size = 0
        self.restarts = 0
        self.room = 0
        """Bytes free for the KV cache at the first batch."""
        self.ahead: Sequence[Future[None]] = ()
        """Kernels that threads compile and launch, which must not happen while a graph is captured."""
        self.release()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile with fixed batches, so that kernels do not depend on which batch comes first."""
        self.ahead = compile_ahead(self.model, self.kernels, self.cache_dtype)
        sampling = Sampling(max_tokens=2)
        with varying_tokens(self.model.causal_lm):
            self.draw(
                [Row(np.array([row]), 0, row, sampling.max_tokens) for row in range(WARM_UP_ROWS)], sampling, _ignore
            )
        self.release()
        self.room = 0

    def draw(self, rows: Sequence[Row], sampling: Sampling, progress: Progress) -> list[SampledRow]:
        """Sample every row; rows that do not fit are admitted as others finish."""
        self.start(sampling)
        self.add(rows)
        drawn: dict[Row, SampledRow] = {}
        while self.is_busy:
            drawn |= self.advance()
            progress("sampling", len(drawn), len(rows))
        return [drawn[row] for row in rows]

    def start(self, sampling: Sampling) -> None:
        """Start an empty batch with these sampling options."""
        # The temperature is read at every step; all other options that shape logits are captured in the graphs, greedy
        # decoding included.
        kept = 0.0 if sampling.is_greedy else 1.0
        self.filters = replace(sampling, max_tokens=0, n=1, temperature=kept, seed=0, first=0)
        self.temperature = sampling.temperature or 1.0
        self.restarts = 0
        self.waiting.clear()
        self.left.clear()
        self.swapped.clear()
        self.running = [None] * len(self.running)
        self.size = 0
        if self.slots is not None:
            assert self.cache is not None
            for slot in range(len(self.running)):
                self.cache.release(slot)
            self.slots.free(self.slots.everyone)
            self.slots.temperature.fill_(self.temperature)

    def add(self, rows: Iterable[Row]) -> None:
        """Queue rows."""
        self.waiting.extend(rows)

    @property
    def is_busy(self) -> bool:
        """Whether any row is waiting, running or swapped."""
        return bool(self.waiting or self.left or self.swapped)

    def advance(self) -> dict[Row, SampledRow]:
        """Retire finished rows, admit waiting ones, and launch the next steps; returns the finished rows."""
        finished = self._retire()
        try:
            self._launch()
            return finished
        except torch.OutOfMemoryError as error:
            if self.restarts == RESTARTS:
                raise SamplingMemoryError(
                    f"out of GPU memory while sampling, even in {self.room / 2**30:.1f} GiB; does another process "
                    "take memory?  Try: a smaller [training] batch_size or max_tokens, then resume"
                ) from error
        # Outside the handler: its traceback keeps tensors alive.
        self._restart_smaller()
        return finished

    def _launch(self) -> None:
        self._swap_in()
        self._admit()
        steps = min(POLL_EVERY, max(self.left.values(), default=0))
        self._reserve(steps)
        self._compact()
        for _ in range(steps):
            self._step()
        for row in self.left:
            self.left[row] -= steps

    def _restart_smaller(self) -> None:
        """Restart all rows in half of what another process has left of the memory. They sample the same tokens."""
        self.restarts += 1
        self.waiting = deque([*self.left, *(swapped.row for swapped in self.swapped), *self.waiting])
        self.left.clear()
        self.swapped.clear()
        self.running = []
        self.release()
        self.room = min(self.room, free_memory(self.model.policy.device)) // 2

    def release(self) -> None:
        """Free the cache and the graphs over it."""
        self.shape: BatchShape | None = None
        self.slots: Slots | None = None
        self.cache: PagedCache | None = None
        self._forget_graphs()

    def sizes(self) -> dict[str, int]:
        """Memory that batches are planned for, and the allocated shape."""
        return {"room": self.room} | ({k: int(v) for k, v in asdict(self.shape).items()} if self.shape else {})

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Allocate what an earlier process had: waves and the largest graph depend on it."""
        self.room = sizes["room"]
        if "rows" not in sizes:
            return True
        kept = {key: value for key, value in sizes.items() if key not in ("room", "is_penalised")}
        shape = BatchShape(**kept, is_penalised=bool(sizes["is_penalised"]))
        # Runs may share an engine; keep what another run has allocated.
        shape = self.shape.joined(shape) if self.shape is not None else shape
        if self._blocks_that_fit(shape.rows, shape.capacity) < shape.blocks:
            return False
        self.release()
        self._allocate(shape)
        return True

    def _forget_graphs(self) -> None:
        self.graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}
        if self.model.policy.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _retire(self) -> dict[Row, SampledRow]:
        if self.slots is None or not self.left:
            return {}
        done, drawn = self.slots.poll(self.size)
        over = [(slot, row) for slot, row in enumerate(self.running[: self.size]) if row is not None and done[slot]]
        if not over:
            return {}
        found = self.slots.take_finished(
            [slot for slot, _ in over], [drawn[slot] for slot, _ in over], [done[slot] == 1 for slot, _ in over]
        )
        assert self.cache is not None
        for slot, row in over:
            self.cache.release(slot)
            self.running[slot] = None
            del self.left[row]
        return {row: what for (_, row), what in zip(over, found, strict=True)}

    def _admit(self) -> None:
        """Prefill waiting rows while there are free slots and blocks, first come, first served."""
        if not self.waiting or self.swapped:
            return
        self._make_room()
        assert self.slots is not None and self.cache is not None
        free = [slot for slot, row in enumerate(self.running) if row is None]
        admitted = self._choose(len(free))
        for groups in prefill_batches(admitted, self.share) if admitted else ():
            rows = [row for group in groups for row in group]
            assigned, free = free[: len(rows)], free[len(rows) :]
            remaining = iter(assigned)
            where = self.cache.place([Group(len(g[0].prompt), [next(remaining) for _ in g]) for g in groups])
            logits = prefill(self.model, self.cache, groups, where)
            slots = torch.tensor(assigned, device=self.model.policy.device)
            self.slots.admit(slots, rows)
            self._draw(logits, slots)
            for slot, row in zip(assigned, rows, strict=True):
                self.running[slot], self.left[row] = row, row.limit - 1

    def _choose(self, most: int) -> list[Row]:
        """Up to `most` waiting rows whose prompts fit, with a block for the next tokens of every row."""
        assert self.shape is not None and self.cache is not None
        chosen: list[Row] = []
        free = len(self.cache.free)
        while self.waiting and len(chosen) < most:
            row = self.waiting[0]
            if row.tokens > self.shape.capacity or row.limit > self.shape.width:
                break
            is_shared = self.share and bool(chosen) and np.array_equal(chosen[-1].prompt, row.prompt)
            free -= blocks_for(len(row.prompt)) - (len(row.prompt) // BLOCK if is_shared else 0)
            if free < len(self.left) + len(chosen) + 1 and (self.left or chosen):
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _reserve(self, steps: int) -> None:
        """Take blocks for the next steps of every running row.

        If they run out, the cache grows; if it cannot, the rows admitted last make room.
        """
        slots = {row: slot for slot, row in enumerate(self.running) if row is not None}
        for row in list(self.left):
            tokens = min(len(row.prompt) + row.limit - 1 - self.left.get(row, 0) + steps, row.tokens)
            while row in self.left and not self._cache.reserve(slots[row], tokens):
                if not self._grow():
                    last = next(reversed(self.left))
                    self._swap_out(last, slots[last])
        self._cache.upload()

    def _swap_out(self, row: Row, slot: int) -> None:
        assert self.slots is not None
        state = [held[slot].clone() for held in self.slots.state]
        self.swapped.appendleft(_Swapped(row, self.left.pop(row), state, self._cache.swap_out(slot)))
        self.slots.free(torch.tensor([slot], device=self.model.policy.device))
        self.running[slot] = None

    def _swap_in(self) -> None:
        """Continue swapped rows, in the order of admission, when their blocks and one for every row are free."""
        while self.swapped:
            assert self.slots is not None
            first = self.swapped[0]
            needed = len(first.blocks[0]) + len(self.left) + 1 if self.left else 0
            if len(self._cache.free) < needed or None not in self.running:
                return
            self.swapped.popleft()
            slot = self.running.index(None)
            self._cache.swap_in(slot, first.blocks)
            for held, value in zip(self.slots.state, first.state, strict=True):
                held[slot] = value
            self.running[slot], self.left[first.row] = first.row, first.left

    @property
    def _cache(self) -> PagedCache:
        assert self.cache is not None, "allocated when the first row is admitted"
        return self.cache

    def _make_room(self) -> None:
        """Allocate for running and waiting rows unless the buffers suffice. Running rows keep their slots."""
        wanted = self._wanted([*self.left, *self.waiting])
        if self.shape is not None and self.shape.holds(wanted):
            return
        if self.shape is not None:
            wanted = self.shape.joined(wanted)
            fitting = self._blocks_that_fit(wanted.rows, wanted.capacity)
            wanted = replace(wanted, blocks=min(wanted.blocks, fitting))
        if not self.left:
            self.release()
        self._allocate(wanted)

    def _allocate(self, wanted: BatchShape) -> None:
        """Allocate buffers of this shape; running rows are copied into them."""
        policy = self.model.policy
        old = self.slots
        self._forget_graphs()
        self.slots = Slots(
            wanted.rows, wanted.width, policy.stop_ids, policy.vocabulary if wanted.is_penalised else 0, policy.device
        )
        self.slots.temperature.fill_(self.temperature)
        if self.cache is None or old is None:
            self.cache = PagedCache(wanted.rows, wanted.blocks, wanted.capacity, self.cache_dtype, policy.device)
        else:
            self.slots.copy_from(old)
            self.cache.grow(wanted.rows, wanted.blocks, wanted.capacity)
        self.shape = wanted
        self.running += [None] * (wanted.rows - len(self.running))
        del self.running[wanted.rows :]

    def _wanted(self, rows: Sequence[Row]) -> BatchShape:
        count, tokens, width = len(rows), max(row.tokens for row in rows), max(row.limit for row in rows)
        if self.shape is not None and self.left:
            # Conversations grow with every turn: spare room avoids reallocating for each of them.
            count = count if count <= self.shape.rows else 2 * count
            tokens = tokens if tokens <= self.shape.capacity else tokens * 3 // 2
            width = width if width <= self.shape.width else 2 * width
        count = min(max(count, SMALLEST), rows_that_fit(self.model.policy, self._room()))
        fitting = self._blocks_that_fit(count, tokens)
        is_penalised = self.filters.repetition_penalty != 1.0
        return BatchShape(
            count, first_blocks(blocks_needed(rows, self.share), fitting, tokens), tokens, width, is_penalised
        )

    def _room(self) -> int:
        """Bytes that cache and logits may take. Free memory fluctuates; a run keeps to what it first planned for."""
        free = free_memory(self.model.policy.device) + (self.cache.bytes if self.cache is not None else 0)
        self.room = self.room or free
        return min(self.room, free)

    def _blocks_that_fit(self, rows: int, longest: int) -> int:
        return blocks_that_fit(self.model.policy, rows, longest, self.cache_dtype, self._room())

    def _grow(self) -> bool:
        """Double the blocks of the cache, as far as memory allows; False if that is not worth it."""
        assert self.shape is not None
        blocks = min(2 * self.shape.blocks, self._blocks_that_fit(self.shape.rows, self.shape.capacity))
        if blocks < WORTH_GROWING * self.shape.blocks:
            return False
        self._allocate(replace(self.shape, blocks=blocks))
        return True

    def _compact(self) -> None:
        """Choose the smallest graph that holds the running rows, and move rows beyond it into free slots."""
        assert self.shape is not None or not self.left
        size = bucket(len(self.left), len(self.running))
        beyond = [slot for slot in range(size, len(self.running)) if self.running[slot] is not None]
        if beyond:
            assert self.slots is not None
            free = [slot for slot in range(size) if self.running[slot] is None][: len(beyond)]
            source, target = (torch.tensor(slots, device=self.model.policy.device) for slots in (beyond, free))
            self.slots.move(source, target)
            for old, new in zip(beyond, free, strict=True):
                self._cache.move(old, new)
                self.running[new], self.running[old] = self.running[old], None
            self._cache.upload()
        self.size = size

    def _step(self) -> None:
        if self.model.policy.device.type != "cuda":
            self._body(self.size)()
            return
        key = (self.size, self.filters)
        if key not in self.graphs:
            self.graphs[key] = self._capture(self.size)
        self.graphs[key].replay()

    def _body(self, size: int) -> Callable[[], None]:
        assert self.slots is not None and self.cache is not None
        slots, attention = self.slots, DecodeAttention(self.kernels, self.cache, self.slots.cached, size)

        def body() -> None:
            # Packed into one row, like prompts: both run through the same compiled graph.
            hidden = self.model.hidden(slots.next_token[None, :size], slots.cached[None, :size].long(), attention)
            self._draw(self.model.head(hidden[0]), slots.everyone[:size])

        return body

    def _draw(self, logits: Tensor, at: Tensor) -> None:
        slots = self.slots
        assert slots is not None
        is_penalised = self.filters.repetition_penalty != 1.0
        if self.filters != Sampling(max_tokens=0):
            # The kernel divides by the temperature; filters need tempered logits, so the division is undone afterwards.
            seen = slots.seen[at] if is_penalised else None
            logits = shape_logits(logits / slots.temperature, self.filters, seen) * slots.temperature
        self.kernels.draw_tokens(logits, slots, at)
        if is_penalised:
            token = slots.next_token[at]
            # A plain True would be a copy from the host, which a graph cannot capture.
            slots.seen.index_put_((at.long(), token), torch.ones_like(token, dtype=torch.bool))

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        assert self.slots is not None
        wait(self.ahead)
        body = self._body(size)
        kept = [(tensor, tensor.clone()) for tensor in self.slots.state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        # The warm-up sampled tokens: reset the rows. What it wrote to the cache lies past their ends.
        for tensor, value in kept:
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        # In split mode, another thread trains meanwhile, and may allocate.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            body()
        return graph


def _ignore(phase: str, done: int, total: int) -> None:
    pass
