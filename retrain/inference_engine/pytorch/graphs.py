"""Decoding on a GPU: one CUDA graph a batch size, replayed token after token with no word to the host.

A step embeds, runs the layers with our attention over a dense cache, draws, and writes the drawn token where the next
step finds it. The host looks in now and then, lets finished rows go and moves on to a smaller graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retrain.backends.local.attention import Scoring
from retrain.inference_engine.pytorch.kernels import SamplingBuffers, decode_attention, draw_tokens
from retrain.inference_engine.pytorch.weights import SamplingModel

# Steps between looks at which rows are done.
LOOK_EVERY = 16
NO_WINDOW = 1 << 30
# Programs an H200-sized GPU wants in flight before attention is worth no further splitting.
PROGRAMS = 1024
MAX_SPLITS = 16


class StaticCache:
    """Keys and values of all layers at fixed addresses, shaped (rows, key heads, capacity, size) a layer."""

    def __init__(self, layers: int, rows: int, capacity: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        heads, size = shape
        self.capacity = capacity
        self.layers = [
            tuple(torch.zeros(rows, heads, capacity, size, dtype=dtype, device=device) for _ in range(2)) for _ in range(layers)
        ]

    def move(self, rows: Tensor) -> None:
        """Bring `rows` to the front, in that order."""
        count = len(rows)
        for pair in self.layers:
            for held in pair:
                held[:count] = held.index_select(0, rows)


class GraphAttention:
    """Attention of one new token for the first rows of the cache."""

    def __init__(self, cache: StaticCache, cached: Tensor, splits: int) -> None:
        self.cache, self.cached, self.splits = cache, cached, splits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend and append."""
        keys, values = self.cache.layers[layer]
        window = scoring.window if scoring.window is not None else NO_WINDOW
        return decode_attention(query, key, value, (keys, values), self.cached, scoring.scale, window, self.splits)


class GraphDecoder:
    """Captured decode steps over one cache, from the full batch down to small ones."""

    def __init__(self, model: SamplingModel, cache: StaticCache, buffers: SamplingBuffers, temperature: float) -> None:
        self.model, self.cache, self.buffers, self.temperature = model, cache, buffers, temperature
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def step(self, rows: int) -> None:
        """One token for the first `rows` rows."""
        if rows not in self.graphs:
            self.graphs[rows] = self._capture(rows)
        self.graphs[rows].replay()

    def _body(self, rows: int) -> Callable[[], None]:
        buffers, key_heads = self.buffers, self.cache.layers[0][0].shape[1]
        splits = 1
        while splits < MAX_SPLITS and rows * key_heads * splits < PROGRAMS:
            splits *= 2
        attention = GraphAttention(self.cache, buffers.cached, splits)

        def body() -> None:
            positions = buffers.cached[:rows, None].long()
            hidden = self.model.hidden(buffers.next_token[:rows, None], positions, attention)
            draw_tokens(self.model.policy.head(hidden[:, 0]), self.temperature, buffers)

        return body

    def _capture(self, rows: int) -> torch.cuda.CUDAGraph:
        body, saved = self._body(rows), [t.clone() for t in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            body()
        # Warming up drew tokens; the rows go back to where they were. What it wrote into the cache lies past their ends.
        for tensor, value in zip(self._state(), saved, strict=True):
            tensor.copy_(value)
        return graph

    def _state(self) -> list[Tensor]:
        b = self.buffers
        return [b.next_token, b.drawn, b.cached, b.done]
