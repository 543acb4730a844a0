"""Decoding with plain PyTorch, one step at a time: on the CPU, and wherever our kernels do not run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.cache import Decode, KVCache, Prefill
from retrain.inference_engine.pytorch.sampler import Drawn, draw, shape_logits
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.seeding import derive_seed
from retrain.types import IntArray, Sampling

# Copying the cache costs about as much as a few steps, so rows leave it only when enough of them are finished.
SHRINK_BELOW = 0.8


class EagerDecoder:
    """Makes a new batch for each call; nothing is held in between."""

    cache_bytes = 0

    def __init__(self, model: SamplingModel) -> None:
        self.model = model

    def draw(
        self, prompts: Sequence[IntArray], sampling: Sampling, first_row: int, share: bool, progress: Progress
    ) -> Drawn:
        """Complete every prompt `sampling.n` times, all at once."""
        batch = _Batch(self.model, prompts, sampling, derive_seed(sampling.seed, "rows", first_row))
        batch.prefill(share)
        while batch.advance():
            progress("sampling", batch.finished, batch.rows)
        return batch.drawn()

    def release(self) -> None:
        """Nothing to give back."""


class _Batch:
    """One batch from prefill to the last finished completion. Row r belongs to prompt r // n."""

    def __init__(self, model: SamplingModel, prompts: Sequence[IntArray], sampling: Sampling, seed: int) -> None:
        self.model, self.prompts, self.sampling = model, prompts, sampling
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = len(prompts) * sampling.n
        device = model.policy.device
        self.alive = torch.arange(self.rows, device=device)
        """Rows still in the batch, finished or not."""
        self.done = torch.zeros(self.rows, dtype=torch.bool, device=device)
        self.stops = torch.tensor(model.policy.stop_ids, dtype=torch.long, device=device)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.finished = 0
        self.seen = self._seen_in_prompts() if sampling.repetition_penalty != 1.0 else None

    def prefill(self, share: bool) -> None:
        """Run the prompts, each once for its whole group when `share` says so, and draw the first tokens."""
        copies = self.sampling.n if share else 1
        fed = list(self.prompts) if share else [prompt for prompt in self.prompts for _ in range(self.sampling.n)]
        lengths = [len(prompt) for prompt in fed]
        device = self.model.policy.device
        lengths_t = torch.tensor(lengths, device=device)
        self.cache = KVCache(self.model.policy.layers, lengths_t.repeat_interleave(copies))
        ids = torch.as_tensor(np.concatenate(fed), dtype=torch.long).to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        hidden = self.model.hidden(ids[None], positions[None], Prefill(self.cache, lengths, copies, device))[0]
        last = hidden[lengths_t.cumsum(0) - 1]
        self._draw(self.model.policy.head(last).repeat_interleave(copies, dim=0))

    def advance(self) -> bool:
        """Take one token further everywhere; False when nothing is left to do."""
        if len(self.tokens) >= self.sampling.max_tokens or self.finished == self.rows:
            return False
        self._shrink()
        self.cache.advance()
        last = self.tokens[-1][self.alive]
        positions = self.cache.lengths - 1
        hidden = self.model.hidden(last[:, None], positions[:, None], Decode(self.cache))
        self._draw(self.model.policy.head(hidden[:, 0]))
        return True

    def drawn(self) -> Drawn:
        """All that was drawn so far."""
        tokens, logprobs, entropies = (torch.stack(s, dim=1) for s in (self.tokens, self.logprobs, self.entropies))
        return Drawn(tokens, logprobs, entropies, self.lengths, self.done)

    def _draw(self, logits: Tensor) -> None:
        device = logits.device
        # A number for every row of the batch, also for those that have left: who is drawn with what never shifts.
        uniforms = torch.rand(self.rows, generator=self.generator, dtype=torch.float64).to(device)[self.alive]
        shaped = shape_logits(logits, self.sampling, self.seen[self.alive] if self.seen is not None else None)
        ids, logprobs, entropies = draw(shaped, uniforms)
        for store, values in ((self.tokens, ids), (self.logprobs, logprobs), (self.entropies, entropies)):
            column = torch.zeros(self.rows, dtype=values.dtype, device=device)
            column[self.alive] = values
            store.append(column)
        self.lengths[self.alive] += (~self.done[self.alive]).long()
        if self.seen is not None:
            self.seen[self.alive, ids] = True
        self.done[self.alive] |= torch.isin(ids, self.stops)
        self.finished = int(self.done.sum())

    def _shrink(self) -> None:
        """Let finished rows leave the batch, once they are enough to be worth the copy."""
        going_on = (~self.done[self.alive]).nonzero().squeeze(1)
        if len(going_on) <= SHRINK_BELOW * len(self.alive):
            self.alive = self.alive[going_on]
            self.cache.keep(going_on)

    def _seen_in_prompts(self) -> Tensor:
        device = self.model.policy.device
        seen = torch.zeros(self.rows, self.model.policy.vocabulary, dtype=torch.bool, device=device)
        for row in range(self.rows):
            seen[row, torch.as_tensor(self.prompts[row // self.sampling.n], device=device)] = True
        return seen
