"""Decoding on a GPU: one CUDA graph a batch size, replayed token after token without a word to the host.

A step embeds, runs the layers with our attention over a dense cache, draws, and leaves the drawn token where the next
step finds it. The host looks in now and then, lets finished rows go, and moves on to a smaller graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.attention import PackedAttention, Scoring
from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.kernels import Caches, SamplingBuffers, decode_attention, draw_tokens
from retrain.inference_engine.pytorch.sampler import Drawn, shape_logits
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.types import IntArray, Sampling

# Steps between looks at which rows are done.
LOOK_EVERY = 16
# Programs that keep every multiprocessor busy; fewer rows split their sequences to make up for it.
PROGRAMS = 1024
MAX_SPLITS = 16
# Batches of fewer rows cost the same, so they share one graph.
SMALLEST = 8
CAPACITY_BLOCK = 128
PREFILL_TOKENS = 32768


@dataclass(frozen=True)
class Shape:
    """What a set of graphs was captured for. Whatever is not in here may change between replays."""

    rows: int
    capacity: int
    width: int
    filters: Sampling
    """The sampling filters, with everything else at its default."""

    def holds(self, other: Shape) -> bool:
        """Whether graphs of this shape can serve the other."""
        fits = self.rows >= other.rows and self.capacity >= other.capacity and self.width == other.width
        return fits and self.filters == other.filters


class GraphDecoder:
    """Static buffers and the graphs captured over them; made again only when a batch outgrows them."""

    def __init__(self, model: SamplingModel) -> None:
        self.model = model
        self.shape: Shape | None = None
        self.caches: list[Caches] = []
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache holds now, and that a larger one could use in its place."""
        return sum(held.nbytes for pair in self.caches for held in pair)

    def draw(
        self, prompts: Sequence[IntArray], sampling: Sampling, first_row: int, share: bool, progress: Progress
    ) -> Drawn:
        """Complete every prompt `sampling.n` times, all at once."""
        rows = len(prompts) * sampling.n
        self._make_room(rows, max(map(len, prompts)) + sampling.max_tokens, sampling)
        self.buffers.seed.fill_(sampling.seed & 0x7FFFFFFF)
        self.buffers.first_row.fill_(first_row)
        self.buffers.temperature.fill_(sampling.temperature)
        self._prefill(prompts, sampling, share)
        size = _bucket(rows, self.rows)
        active = rows
        while active:
            for _ in range(LOOK_EVERY):
                self._step(size)
            active = int((self.buffers.done[:size] == 0).sum())
            progress("sampling", rows - active, rows)
            smaller = _bucket(active, self.rows)
            if active > 0 and smaller < size:
                self._bring_forward(size, smaller)
                size = smaller
        b = self.buffers
        return Drawn(b.tokens[:rows], b.logprobs[:rows], b.entropies[:rows], b.lengths[:rows], b.endings[:rows] == 1)

    def _make_room(self, rows: int, tokens: int, sampling: Sampling) -> None:
        """Allocate for this batch, unless what is there already holds it."""
        filters = Sampling(
            max_tokens=0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
        )
        capacity = -(-(tokens + LOOK_EVERY) // CAPACITY_BLOCK) * CAPACITY_BLOCK
        wanted = Shape(max(rows, SMALLEST), capacity, sampling.max_tokens, filters)
        if self.shape is not None and self.shape.holds(wanted):
            return
        if self.shape is not None and self.shape.width == wanted.width and self.shape.filters == wanted.filters:
            wanted = Shape(max(self.shape.rows, wanted.rows), max(self.shape.capacity, capacity), wanted.width, filters)
        self.release()
        self.shape, self.rows = wanted, wanted.rows
        policy = self.model.policy
        self.buffers = SamplingBuffers(wanted.rows, wanted.width, policy.stop_ids, policy.device)
        penalised = sampling.repetition_penalty != 1.0
        seen_shape = (wanted.rows, policy.vocabulary if penalised else 0)
        self.seen = torch.zeros(seen_shape, dtype=torch.bool, device=policy.device)
        self.pool = torch.cuda.graph_pool_handle()

    def release(self) -> None:
        """Give back the cache and the graphs over it."""
        self.shape = None
        self.caches, self.graphs = [], {}
        torch.cuda.empty_cache()

    def _prefill(self, prompts: Sequence[IntArray], sampling: Sampling, share: bool) -> None:
        """Fill the cache and draw each row's first token; rows beyond the batch count as done."""
        b, device = self.buffers, self.model.policy.device
        rows = len(prompts) * sampling.n
        for tensor in (b.drawn, b.cached, b.next_token, b.lengths, b.endings, self.seen):
            tensor.zero_()
        b.done.fill_(1)
        b.done[:rows] = 0
        torch.arange(self.rows, out=b.row_ids)
        copies = sampling.n if share else 1
        fed = list(prompts) if share else [prompt for prompt in prompts for _ in range(sampling.n)]
        lengths = torch.tensor([len(prompt) for prompt in fed], dtype=torch.int32, device=device)
        b.cached[:rows] = lengths.repeat_interleave(copies) - 1
        last = [self._prefill_some(fed[at:end], at * copies, copies) for at, end in _by_tokens(fed)]
        if self.seen.shape[1]:
            for row in range(rows):
                self.seen[row, torch.as_tensor(prompts[row // sampling.n], device=device)] = True
        logits = self.model.policy.head(torch.cat(last)).repeat_interleave(copies, dim=0)
        padded = logits.new_zeros(self.rows, logits.shape[1])
        padded[:rows] = logits
        self._draw(padded, self.rows)

    def _prefill_some(self, prompts: Sequence[IntArray], first_row: int, copies: int) -> Tensor:
        device = self.model.policy.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.as_tensor(np.concatenate(prompts), dtype=torch.long).to(device)
        positions = torch.as_tensor(np.concatenate([np.arange(n) for n in lengths])).to(device)
        attend = _Fill(self, lengths, first_row, copies)
        hidden = self.model.hidden(ids[None], positions[None], attend)[0]
        return hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]

    def cache_of(self, layer: int, heads: int, size: int) -> Caches:
        """A layer's cache, allocated when its first keys arrive and their shape is known."""
        assert self.shape is not None
        policy = self.model.policy
        while len(self.caches) <= layer:
            shape = (self.shape.rows, heads, self.shape.capacity, size)
            pair = (
                torch.zeros(shape, dtype=policy.dtype, device=policy.device),
                torch.zeros(shape, dtype=policy.dtype, device=policy.device),
            )
            self.caches.append(pair)
        return self.caches[layer]

    def _step(self, size: int) -> None:
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        self.graphs[size].replay()

    def _body(self, size: int) -> Callable[[], None]:
        attention = _Decode(self, size)

        def body() -> None:
            b = self.buffers
            positions = b.cached[:size, None].long()
            hidden = self.model.hidden(b.next_token[:size, None], positions, attention)
            self._draw(self.model.policy.head(hidden[:, 0]), size)

        return body

    def _draw(self, logits: Tensor, size: int) -> None:
        assert self.shape is not None
        b = self.buffers
        if self.shape.filters != Sampling(max_tokens=0):
            # The kernel divides by the temperature itself; filters look at tempered logits, so it is undone after them.
            seen = self.seen[:size] if self.seen.shape[1] else None
            logits = shape_logits(logits / b.temperature, self.shape.filters, seen) * b.temperature
        draw_tokens(logits, b)
        if self.seen.shape[1]:
            self.seen[:size].scatter_(1, b.next_token[:size, None], True)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        body = self._body(size)
        kept = [(tensor, tensor.clone()) for tensor in self._state()]
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

    def _state(self) -> list[Tensor]:
        b = self.buffers
        written = [b.tokens, b.logprobs, b.entropies, b.lengths, b.endings]
        return [b.next_token, b.drawn, b.cached, b.done, self.seen, *written]

    def _bring_forward(self, size: int, smaller: int) -> None:
        """Put the rows that go on first, and keep as many rows as the smaller batch holds."""
        b = self.buffers
        order = (b.done[:size] != 0).int().argsort(stable=True)[:smaller]
        moved = [b.next_token, b.drawn, b.cached, b.done, b.row_ids, *(held for pair in self.caches for held in pair)]
        for tensor in [*moved, *([self.seen] if self.seen.shape[1] else [])]:
            tensor[:smaller] = tensor.index_select(0, order)


class _Fill(PackedAttention):
    """Attention over packed prompts that also fills the cache, each prompt into the rows of its completions."""

    def __init__(self, decoder: GraphDecoder, lengths: Sequence[int], first_row: int, copies: int) -> None:
        super().__init__(lengths, decoder.model.policy.device)
        self.decoder, self.first_row, self.copies = decoder, first_row, copies

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        rows = slice(self.first_row, self.first_row + self.rows * self.copies)
        caches = self.decoder.cache_of(layer, key.shape[1], key.shape[3])
        for held, new in zip(caches, (key, value), strict=True):
            held[rows, :, : self.longest] = self._pad(new).repeat_interleave(self.copies, dim=0)
        return super().attend(layer, query, key, value, scoring)


class _Decode:
    """Attention of one new token for the first rows of the cache."""

    def __init__(self, decoder: GraphDecoder, size: int) -> None:
        self.decoder = decoder
        key_heads = decoder.caches[0][0].shape[1]
        self.splits = 1
        while self.splits < MAX_SPLITS and size * key_heads * self.splits < PROGRAMS:
            self.splits *= 2

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        caches, cached = self.decoder.caches[layer], self.decoder.buffers.cached
        return decode_attention(query, key, value, caches, cached, scoring, self.splits)


def _bucket(rows: int, largest: int) -> int:
    """The smallest captured batch size that holds `rows`: 8, 12, 16, 24, 32, 48, … and the largest batch itself."""
    size = SMALLEST
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, largest)


def _by_tokens(prompts: Sequence[IntArray]) -> list[tuple[int, int]]:
    """Ranges of prompts that are prefilled together."""
    ranges, start, tokens = [], 0, 0
    for index, prompt in enumerate(prompts):
        if index > start and tokens + len(prompt) > PREFILL_TOKENS:
            ranges.append((start, index))
            start, tokens = index, 0
        tokens += len(prompt)
    return [*ranges, (start, len(prompts))]
