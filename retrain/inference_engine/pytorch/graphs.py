"""Decoding on a GPU: one CUDA graph a batch size, replayed token after token without a word to the host.

A step embeds, runs the layers with our attention over a dense cache, draws, and leaves the drawn token where the next
step finds it. Now and then the host looks in: finished rows leave, waiting ones take their places, and when nobody
waits the batch moves on to a smaller graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.cache import KVCache, Store, free_memory, rows_that_fit
from retrain.inference_engine.pytorch.decoder import Drawn, Row, in_prefills, prefill
from retrain.inference_engine.pytorch.slots import Slots
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.attention import Scoring
from retrain.modeling.distribution import shape_logits
from retrain.types import Sampling

# Steps between looks at which rows are done.
LOOK_EVERY = 16
# Programs that keep every multiprocessor busy; fewer rows split their sequences to make up for it.
PROGRAMS = 1024
MAX_SPLITS = 16
# Batches of fewer rows cost the same, so they share one graph; more rows than the largest take turns.
SMALLEST = 8
LARGEST = 1024
CAPACITY_BLOCK = 128
# Free memory goes up and down: only so many times more rows are worth a new cache and new graphs.
WORTH_GROWING = 1.25
# Batches of two sizes, so that rows and prompt tokens are known to vary.
WARM_UP_ROWS = (24, 12)
WARM_UP_LENGTH = 64


class Kernels(Protocol):
    """What a decode step needs beside the model's layers; kernels.py has it in Triton."""

    def decode_attention(
        self,
        query: Tensor,
        pair: tuple[Tensor, Tensor],
        stores: tuple[Store, Store],
        cached: Tensor,
        scoring: Scoring,
        splits: int,
    ) -> Tensor:
        """Attention of one new token a row over its cache, which it then joins."""
        ...

    def draw_tokens(self, logits: Tensor, state: Slots, slots: Tensor) -> None:
        """Draw one token for each of `slots` and take note of it; rows that are done stay as they are."""
        ...


@dataclass(frozen=True)
class Shape:
    """What the buffers hold: slots, tokens of cache a slot, tokens drawn a slot, and whether tokens seen are kept."""

    rows: int
    capacity: int
    width: int
    is_penalised: bool

    def holds(self, other: Shape) -> bool:
        """Whether every row of the other has room here, perhaps after waiting for its turn."""
        is_long = self.capacity >= other.capacity and self.width >= other.width
        return is_long and self.is_penalised >= other.is_penalised and WORTH_GROWING * self.rows >= other.rows

    def joined(self, other: Shape) -> Shape:
        """What holds both."""
        return Shape(
            max(self.rows, other.rows),
            max(self.capacity, other.capacity),
            max(self.width, other.width),
            self.is_penalised or other.is_penalised,
        )


class GraphDecoder:
    """A running batch over static buffers, and the graphs captured over them.

    `start`, then `add` rows at any time and `advance` as long as it is `busy`; `draw` does so for a list of rows.
    """

    def __init__(self, model: SamplingModel, kernels: Kernels, cache: torch.dtype, share: bool, told: str) -> None:
        self.model, self.kernels, self.cache_dtype, self.share, self.description = model, kernels, cache, share, told
        self.filters = Sampling(max_tokens=0)
        self.temperature = 1.0
        self.waiting: deque[Row] = deque()
        self.seated: list[Row | None] = []
        self.left: dict[Row, int] = {}
        """Steps after which a row is done at the latest."""
        self.size = 0
        self.room = 0
        """Bytes that were free for a cache when the first batch was drawn."""
        self.release()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile for the same batches in every process, so that no kernel depends on which batch came first."""
        prompt = np.arange(min(WARM_UP_LENGTH, self.model.policy.context_length - 2)) % self.model.policy.vocabulary
        for rows in WARM_UP_ROWS:
            # Prompts that differ are prefilled one by one.
            prompts = [np.roll(prompt, row) for row in range(rows)]
            sampling = Sampling(max_tokens=2)
            self.draw([Row(ids, 0, n, sampling.max_tokens) for n, ids in enumerate(prompts)], sampling, _ignore)
        self.release()
        self.room = 0

    def draw(self, rows: Sequence[Row], sampling: Sampling, progress: Progress) -> list[Drawn]:
        """Draw every row; those that do not fit at once enter as others finish."""
        self.start(sampling)
        self.add(rows)
        drawn: dict[Row, Drawn] = {}
        while self.is_busy:
            drawn |= self.advance()
            progress("sampling", len(drawn), len(rows))
        return [drawn[row] for row in rows]

    def start(self, sampling: Sampling) -> None:
        """Begin an empty batch that draws this way."""
        # The temperature is read at each step; everything else that shapes logits is part of the graphs, and so is
        # greedy decoding: a filter that leaves one token.
        kept = 0.0 if sampling.is_greedy else 1.0
        self.filters = replace(sampling, max_tokens=0, n=1, temperature=kept, seed=0, first=0)
        self.temperature = sampling.temperature or 1.0
        self.waiting.clear()
        self.left.clear()
        self.seated = [None] * len(self.seated)
        self.size = 0
        if self.slots is not None:
            self.slots.vacate(self.slots.everyone)
            self.slots.temperature.fill_(self.temperature)

    def add(self, rows: Iterable[Row]) -> None:
        """Let rows wait for a place."""
        self.waiting.extend(rows)

    @property
    def is_busy(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self.waiting or self.left)

    def advance(self) -> dict[Row, Drawn]:
        """Rows that finished leave, waiting ones enter, and the next steps are under way when this returns."""
        finished = self._let_go()
        self._let_in()
        self._close_ranks()
        steps = min(LOOK_EVERY, max(self.left.values(), default=0))
        for _ in range(steps):
            self._step()
        for row in self.left:
            self.left[row] -= steps
        return finished

    def release(self) -> None:
        """Give back the cache and the graphs over it."""
        self.shape: Shape | None = None
        self.slots: Slots | None = None
        self.cache: KVCache | None = None
        self._forget_graphs()

    def sizes(self) -> dict[str, int]:
        """The memory that batches are planned for, and what is allocated."""
        return {"room": self.room} | ({k: int(v) for k, v in asdict(self.shape).items()} if self.shape else {})

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Allocate what an earlier process had: waves and the largest graph follow from it."""
        self.room = sizes["room"]
        if "rows" not in sizes:
            return True
        shape = Shape(sizes["rows"], sizes["capacity"], sizes["width"], bool(sizes["is_penalised"]))
        # Runs may share an engine; what another one has allocated stays.
        shape = self.shape.joined(shape) if self.shape is not None else shape
        if self._rows_that_fit(shape.capacity) < shape.rows:
            return False
        self.release()
        self._allocate(shape)
        return True

    def _forget_graphs(self) -> None:
        self.graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}
        if self.model.policy.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _let_go(self) -> dict[Row, Drawn]:
        if self.slots is None or not self.left:
            return {}
        done, drawn = self.slots.look(self.size)
        over = [(slot, row) for slot, row in enumerate(self.seated[: self.size]) if row is not None and done[slot]]
        if not over:
            return {}
        found = self.slots.drawn_in(
            [slot for slot, _ in over], [drawn[slot] for slot, _ in over], [done[slot] == 1 for slot, _ in over]
        )
        for slot, row in over:
            self.seated[slot] = None
            del self.left[row]
        return {row: what for (_, row), what in zip(over, found, strict=True)}

    def _let_in(self) -> None:
        """Run the prompts of as many waiting rows as there are places, first come first served."""
        if not self.waiting:
            return
        self._make_room()
        assert self.shape is not None and self.slots is not None and self.cache is not None
        free = [slot for slot, row in enumerate(self.seated) if row is None]
        entering: list[Row] = []
        while self.waiting and len(entering) < len(free) and self._has_room_for(self.waiting[0]):
            entering.append(self.waiting.popleft())
        if not entering:
            return
        for some in in_prefills(entering, self.share):
            places, free = free[: len(some)], free[len(some) :]
            slots = torch.tensor(places, device=self.model.policy.device)
            logits = prefill(self.model, self.cache, some, slots, self.share)
            self.slots.enter(slots, some)
            self._draw(logits, slots)
            for slot, row in zip(places, some, strict=True):
                self.seated[slot], self.left[row] = row, row.limit - 1

    def _has_room_for(self, row: Row) -> bool:
        assert self.shape is not None
        return row.tokens <= self.shape.capacity and row.limit <= self.shape.width

    def _make_room(self) -> None:
        """Allocate for the rows that run and wait, unless what is there will do. Running rows keep their places."""
        wanted = self._wanted([*self.left, *self.waiting])
        if self.shape is not None and self.shape.holds(wanted):
            return
        joined = self.shape.joined(wanted) if self.shape is not None else wanted
        if self._rows_that_fit(joined.capacity) >= joined.rows:
            wanted = joined
        elif self.left:
            # Too little memory to grow around those that run: whoever does not fit waits until they are done.
            return
        if not self.left:
            self.release()
        self._allocate(wanted)

    def _allocate(self, wanted: Shape) -> None:
        """Buffers of this shape; rows that run move into them."""
        policy = self.model.policy
        old = self.slots
        self._forget_graphs()
        self.slots = Slots(
            wanted.rows, wanted.width, policy.stop_ids, policy.vocabulary if wanted.is_penalised else 0, policy.device
        )
        self.slots.temperature.fill_(self.temperature)
        if self.cache is None or old is None:
            self.cache = KVCache(wanted.rows, wanted.capacity, self.cache_dtype)
        else:
            self.slots.copy_from(old)
            self.cache.grow(wanted.rows, wanted.capacity)
        self.shape = wanted
        self.seated += [None] * (wanted.rows - len(self.seated))
        del self.seated[wanted.rows :]

    def _wanted(self, rows: Sequence[Row]) -> Shape:
        count, tokens, width = len(rows), max(row.tokens for row in rows), max(row.limit for row in rows)
        if self.shape is not None and self.left:
            # More comes as turns are taken and conversations grow: room to spare saves growing at each of them.
            count = count if count <= self.shape.rows else 2 * count
            tokens = tokens if tokens <= self.shape.capacity else tokens * 3 // 2
            width = width if width <= self.shape.width else 2 * width
        capacity = -(-tokens // CAPACITY_BLOCK) * CAPACITY_BLOCK
        most = min(LARGEST, self._rows_that_fit(capacity))
        return Shape(min(max(count, SMALLEST), most), capacity, width, self.filters.repetition_penalty != 1.0)

    def _rows_that_fit(self, capacity: int) -> int:
        free = free_memory(self.model.policy.device) + (self.cache.bytes if self.cache is not None else 0)
        self.room = self.room or free
        # What is free goes up and down with everything else; a run that planned for less stays with it.
        return rows_that_fit(self.model.policy, capacity, self.cache_dtype, min(self.room, free))

    def _close_ranks(self) -> None:
        """Choose the smallest graph that holds the rows, and seat those beyond it in front."""
        assert self.shape is not None or not self.left
        size = _bucket(len(self.left), len(self.seated))
        beyond = [slot for slot in range(size, len(self.seated)) if self.seated[slot] is not None]
        if beyond:
            assert self.slots is not None and self.cache is not None
            free = [slot for slot in range(size) if self.seated[slot] is None][: len(beyond)]
            source, target = (torch.tensor(slots, device=self.model.policy.device) for slots in (beyond, free))
            self.slots.move(source, target)
            self.cache.move(source, target)
            for old, new in zip(beyond, free, strict=True):
                self.seated[new], self.seated[old] = self.seated[old], None
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
        slots, attention = self.slots, _Decode(self.kernels, self.cache, self.slots.cached, size)

        def body() -> None:
            positions = slots.cached[:size, None].long()
            hidden = self.model.hidden(slots.next_token[:size, None], positions, attention)
            self._draw(self.model.head(hidden[:, 0]), slots.everyone[:size])

        return body

    def _draw(self, logits: Tensor, at: Tensor) -> None:
        slots = self.slots
        assert slots is not None
        is_penalised = self.filters.repetition_penalty != 1.0
        if self.filters != Sampling(max_tokens=0):
            # The kernel divides by the temperature itself; filters look at tempered logits, so it is undone after them.
            seen = slots.seen[at] if is_penalised else None
            logits = shape_logits(logits / slots.temperature, self.filters, seen) * slots.temperature
        self.kernels.draw_tokens(logits, slots, at)
        if is_penalised:
            token = slots.next_token[at]
            # A plain True would be copied from the host, which no graph can hold.
            slots.seen.index_put_((at.long(), token), torch.ones_like(token, dtype=torch.bool))

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        assert self.slots is not None
        body = self._body(size)
        kept = [(tensor, tensor.clone()) for tensor in self.slots.state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        # Warming up drew tokens: the rows go back to where they were. What the cache got lies past their ends.
        for tensor, value in kept:
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            body()
        return graph


class _Decode:
    """Attention of one new token for the first rows of the cache."""

    def __init__(self, kernels: Kernels, cache: KVCache, cached: Tensor, size: int) -> None:
        self.kernels, self.cache, self.cached = kernels, cache, cached
        key_heads = next(iter(cache.layers.values()))[0].values.shape[1]
        self.splits = 1
        while self.splits < MAX_SPLITS and size * key_heads * self.splits < PROGRAMS:
            self.splits *= 2

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        stores = self.cache.layers[layer]
        return self.kernels.decode_attention(query, (key, value), stores, self.cached, scoring, self.splits)


def _ignore(phase: str, done: int, total: int) -> None:
    pass


def _bucket(rows: int, largest: int) -> int:
    """The smallest captured batch size that holds `rows`: 8, 12, 16, 24, 32, 48, … and the largest batch itself."""
    size = SMALLEST
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, largest)
