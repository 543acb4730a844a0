"""Eager decoding with plain PyTorch: on the CPU, and wherever the Triton kernels do not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from retrain.capacity.sampling import DENSE_BLOCK, dense_capacity
from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.cache import Decode, KVCache, Placement, free_memory, rows_that_fit
from retrain.inference_engine.pytorch.decoder import Row, SampledRow, prefill, prefill_batches
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.distribution import draw, shape_logits
from retrain.modeling.policy import Policy
from retrain.types import Sampling

# Compacting the cache costs a few decode steps, so it waits until enough rows are finished.
SHRINK_BELOW = 0.8


class Forward(Protocol):
    """Forward passes of one batch: prefill, then one token per row at a time."""

    def begin(self, rows: Sequence[Row]) -> Tensor:
        """Prefill the prompts; returns the logits of each row's first token."""
        ...

    def advance(self, tokens: Tensor) -> Tensor:
        """Decode one token per row; returns the logits of the next."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""
        ...


class CachedForward:
    """Forward passes of the sampling model with our attention and KV cache."""

    def __init__(self, model: SamplingModel, cache_dtype: torch.dtype, share: bool) -> None:
        self.model, self.cache_dtype, self.share = model, cache_dtype, share

    def begin(self, rows: Sequence[Row]) -> Tensor:
        """Prefill; with `share`, each prompt once for its group."""
        device = self.model.policy.device
        lengths = [len(row.prompt) for row in rows]
        self.lengths, self.longest = torch.tensor(lengths, device=device), max(lengths)
        self.cache = KVCache(len(rows), dense_capacity(self.longest + 1), self.cache_dtype)
        logits, start = [], 0
        for groups in prefill_batches(rows, self.share):
            prompts = torch.tensor([prompt for prompt, group in enumerate(groups) for _ in group], device=device)
            where = Placement(prompts, torch.arange(start, start + len(prompts), device=device))
            logits.append(prefill(self.model, self.cache, groups, where))
            start += len(prompts)
        return torch.cat(logits)

    def advance(self, tokens: Tensor) -> Tensor:
        """Decode one token."""
        self.lengths = self.lengths + 1
        self.longest += 1
        if self.longest > self.cache.capacity:
            self.cache.grow(self.cache.rows, self.cache.capacity + DENSE_BLOCK)
        attend = Decode(self.cache, self.lengths, self.longest)
        return self.model.head(self.model.hidden(tokens[:, None], self.lengths[:, None] - 1, attend)[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Drop the other rows from the cache."""
        self.lengths = self.lengths.index_select(0, rows)
        self.longest = int(self.lengths.max())
        self.cache.keep(rows)


class EagerDecoder:
    """Builds a new batch for each call and keeps nothing in between."""

    def __init__(
        self, policy: Policy, forward: Callable[[], Forward], cache_dtype: torch.dtype, description: str
    ) -> None:
        self.policy, self.forward, self.cache_dtype, self.description = policy, forward, cache_dtype, description
        self.room = 0
        """Bytes free for the KV cache at the first batch."""
        self.took_turns = False
        """Whether rows had to wait for others."""

    def draw(self, rows: Sequence[Row], sampling: Sampling, progress: Progress) -> list[SampledRow]:
        """Sample all rows at once, or in waves that fit into memory."""
        free = free_memory(self.policy.device)
        self.room = self.room or free
        most = rows_that_fit(self.policy, max(row.tokens for row in rows), self.cache_dtype, min(self.room, free))
        self.took_turns |= most < len(rows)
        drawn: list[SampledRow] = []
        while len(drawn) < len(rows):
            batch = _Batch(self.policy, self.forward(), rows[len(drawn) : len(drawn) + most], sampling)
            batch.begin()
            while batch.advance():
                progress("sampling", len(drawn) + batch.finished, len(rows))
            drawn += batch.drawn()
        return drawn

    def release(self) -> None:
        """Does nothing: memory is not kept between batches."""

    def sizes(self) -> dict[str, int]:
        """Memory that batches are planned for; 0 on a CPU where it has not mattered."""
        return {"room": self.room if self.policy.device.type == "cuda" or self.took_turns else 0}

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Plan for the same memory."""
        self.room = sizes["room"]
        self.took_turns = self.room > 0
        return self.room <= free_memory(self.policy.device)


class _Batch:
    """One batch, from prefill to the last token."""

    def __init__(self, policy: Policy, forward: Forward, rows: Sequence[Row], sampling: Sampling) -> None:
        self.forward, self.rows, self.sampling = forward, rows, sampling
        device = policy.device
        self.width = max(row.limit for row in rows)
        self.limits = torch.tensor([row.limit for row in rows], device=device)
        # Each row has its own random numbers, independent of the rest of the batch.
        uniforms = np.stack([np.random.default_rng((row.seed, row.number)).random(self.width) for row in rows])
        self.uniforms = torch.from_numpy(uniforms).to(device)
        self.alive = torch.arange(len(rows), device=device)
        """Rows still in the batch, finished or not."""
        self.stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.done = torch.zeros_like(self.stopped)
        self.stops = torch.tensor(policy.stop_ids, dtype=torch.long, device=device)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.finished = 0
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(rows), policy.vocabulary, dtype=torch.bool, device=device)
            for index, row in enumerate(rows):
                self.seen[index, torch.as_tensor(row.prompt, device=device)] = True

    def begin(self) -> None:
        """Prefill and sample the first tokens."""
        self._draw(self.forward.begin(self.rows))

    def advance(self) -> bool:
        """Decode one token per row; False if all rows are finished."""
        if self.finished == len(self.rows):
            return False
        self._shrink()
        self._draw(self.forward.advance(self.tokens[-1][self.alive]))
        return True

    def drawn(self) -> list[SampledRow]:
        """The sampled rows."""
        tokens, logprobs, entropies = (
            torch.stack(part, dim=1).cpu().numpy() for part in (self.tokens, self.logprobs, self.entropies)
        )
        lengths, stopped = self.lengths.tolist(), self.stopped.tolist()
        return [
            SampledRow(tokens[row, :length], logprobs[row, :length], entropies[row, :length], stopped[row])
            for row, length in enumerate(lengths)
        ]

    def _draw(self, logits: Tensor) -> None:
        alive = self.alive
        shaped = shape_logits(logits, self.sampling, self.seen[alive] if self.seen is not None else None)
        ids, logprobs, entropies = draw(shaped, self.uniforms[alive, len(self.tokens)])
        for store, values in ((self.tokens, ids), (self.logprobs, logprobs), (self.entropies, entropies)):
            column = torch.zeros(len(self.rows), dtype=values.dtype, device=values.device)
            column[alive] = values
            store.append(column)
        unfinished = ~self.done[alive]
        self.lengths[alive] += unfinished.long()
        if self.seen is not None:
            self.seen[alive, ids] = True
        self.stopped[alive] |= unfinished & torch.isin(ids, self.stops)
        self.done = self.stopped | (self.lengths >= self.limits)
        self.finished = int(self.done.sum())

    def _shrink(self) -> None:
        """Drop finished rows from the batch, once enough of them make the copy worthwhile."""
        unfinished = (~self.done[self.alive]).nonzero().squeeze(1)
        if len(unfinished) <= SHRINK_BELOW * len(self.alive):
            self.alive = self.alive[unfinished]
            self.forward.keep(unfinished)
