"""Samples in this process from the very weights that are being trained.

All completions of a step are one batch. A prompt is prefilled once for its whole group; completions leave the batch as
they finish. What is drawn depends on the seed and the logits alone, not on who else is still in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.model import Policy
from retrain.config.schema import Inference
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.cache import Decode, KVCache, Prefill
from retrain.inference_engine.pytorch.sampler import draw, shape_logits
from retrain.types import Completion, IntArray, Sampling

# Copying the cache costs about as much as a few steps, so rows leave it only when enough of them are finished.
SHRINK_BELOW = 0.8


class PyTorchEngine:
    """An InferenceEngine over a Policy."""

    def __init__(self, policy: Policy, inference: Inference, tokenizer: object, progress: Progress) -> None:
        refuse_unsupported(inference)
        self.policy = policy
        self.tokenizer = tokenizer
        self.share_prefill = inference.prefix_caching
        self.progress = progress
        # Folding the adapter in pays where calls cost more than products; in bf16 it would round the policy.
        self.fold_adapter = policy.device.type == "cpu" and policy.dtype == torch.float32

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Draw completions, all prompts at once, in waves where memory asks for it."""
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.policy.context_length:
                raise RolloutError(
                    f"prompt {index} has {len(prompt)} tokens; the context holds {self.policy.context_length}."
                )
        generator = torch.Generator().manual_seed(sampling.seed)
        with torch.inference_mode(), self._sampling_weights():
            self.policy.adapted.eval()
            return [
                group for wave in self._waves(prompts, sampling) for group in self._draw_wave(wave, sampling, generator)
            ]

    def sync(self, weights: object) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def shutdown(self) -> None:
        """Nothing to free: the weights are the trainer's own."""

    @contextmanager
    def _sampling_weights(self) -> Iterator[None]:
        with self.policy.merged() if self.fold_adapter else nullcontext():
            yield

    def _waves(self, prompts: Sequence[IntArray], sampling: Sampling) -> Iterator[Sequence[IntArray]]:
        """Cut the prompts where the cache of all of them would not fit into free memory."""
        most = self._prompts_that_fit(max(map(len, prompts)) + sampling.max_tokens, sampling.n)
        for start in range(0, len(prompts), most):
            yield prompts[start : start + most]

    def _prompts_that_fit(self, tokens: int, group: int) -> int:
        if self.policy.device.type != "cuda":
            return 1 << 30
        settings = self.policy.causal_lm.config.get_text_config().to_dict()
        heads = settings.get("num_key_value_heads") or settings["num_attention_heads"]
        size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        row_bytes = 2 * self.policy.layers * heads * size * tokens * self.policy.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(self.policy.device)
        reusable = torch.cuda.memory_reserved(self.policy.device) - torch.cuda.memory_allocated(self.policy.device)
        # Growing a block copies one layer, and logits need room as well: three quarters is what may be cache.
        fitting = int(0.75 * (free + reusable)) // (row_bytes * group)
        if fitting < 1:
            raise RolloutError(
                f"the KV cache of one group does not fit: {group} completions × {tokens} tokens × "
                f"{row_bytes / tokens / 1024:.0f} KiB a token = {group * row_bytes / 2**30:.1f} GiB, and "
                f"{(free + reusable) / 2**30:.1f} GiB are free.  Try: a smaller group_size or max_tokens."
            )
        return int(fitting)

    def _draw_wave(
        self, prompts: Sequence[IntArray], sampling: Sampling, generator: torch.Generator
    ) -> list[list[Completion]]:
        wave = _Wave(self.policy, prompts, sampling, generator, self.share_prefill)
        while wave.advance():
            self.progress("sampling", wave.finished_rows, wave.rows)
        return wave.completions(self.tokenizer)


class _Wave:
    """One batch from prefill to the last finished completion. Row r belongs to prompt r // n."""

    def __init__(
        self, policy: Policy, prompts: Sequence[IntArray], sampling: Sampling, generator: torch.Generator, share: bool
    ) -> None:
        self.policy, self.prompts, self.sampling, self.generator = policy, prompts, sampling, generator
        self.rows = len(prompts) * sampling.n
        device = policy.device
        self.alive = torch.arange(self.rows, device=device)
        """Rows still in the batch, finished or not."""
        self.done = torch.zeros(self.rows, dtype=torch.bool, device=device)
        self.stops = torch.tensor(policy.stop_ids, dtype=torch.long, device=device)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.finished_rows = 0
        self.seen = self._seen_in_prompts() if sampling.repetition_penalty != 1.0 else None
        self._prefill(share)

    def _prefill(self, share: bool) -> None:
        copies = self.sampling.n if share else 1
        fed = list(self.prompts) if share else [prompt for prompt in self.prompts for _ in range(self.sampling.n)]
        lengths = [len(prompt) for prompt in fed]
        device = self.policy.device
        lengths_t = torch.tensor(lengths, device=device)
        self.cache = KVCache(self.policy.layers, lengths_t.repeat_interleave(copies))
        ids = torch.as_tensor(np.concatenate(fed), dtype=torch.long).to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        hidden = self.policy.hidden(ids[None], positions[None], Prefill(self.cache, lengths, copies, device))[0]
        last = hidden[lengths_t.cumsum(0) - 1]
        self._draw(self.policy.head(last).repeat_interleave(copies, dim=0))

    def advance(self) -> bool:
        """Take one token further everywhere; False when nothing is left to do."""
        if len(self.tokens) >= self.sampling.max_tokens or self.finished_rows == self.rows:
            return False
        self._shrink()
        self.cache.advance()
        last = self.tokens[-1][self.alive]
        positions = self.cache.lengths - 1
        hidden = self.policy.hidden(last[:, None], positions[:, None], Decode(self.cache))
        self._draw(self.policy.head(hidden[:, 0]))
        return True

    def _draw(self, logits: Tensor) -> None:
        device = logits.device
        # A number for every row of the wave, also for those that have left: who is drawn with what never shifts.
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
        self.finished_rows = int(self.done.sum())

    def _shrink(self) -> None:
        """Let finished rows leave the batch, once they are enough to be worth the copy."""
        going_on = (~self.done[self.alive]).nonzero().squeeze(1)
        if len(going_on) <= SHRINK_BELOW * len(self.alive):
            self.alive = self.alive[going_on]
            self.cache.keep(going_on)

    def _seen_in_prompts(self) -> Tensor:
        seen = torch.zeros(self.rows, self.policy.vocabulary, dtype=torch.bool, device=self.policy.device)
        for row in range(self.rows):
            seen[row, torch.as_tensor(self.prompts[row // self.sampling.n], device=self.policy.device)] = True
        return seen

    def completions(self, tokenizer: object) -> list[list[Completion]]:
        """What was drawn, grouped by prompt."""
        tokens, logprobs, entropies = (
            torch.stack(store, dim=1).cpu().numpy() for store in (self.tokens, self.logprobs, self.entropies)
        )
        lengths, done = self.lengths.tolist(), self.done.tolist()
        texts = tokenizer.batch_decode([tokens[r, :n] for r, n in enumerate(lengths)], skip_special_tokens=True)  # type: ignore[attr-defined]
        rows = [
            Completion(
                token_ids_T=tokens[row, :length].astype(np.int64),
                logprobs_T=logprobs[row, :length].astype(np.float32),
                entropies_T=entropies[row, :length].astype(np.float32),
                text=texts[row],
                finish_reason="stop" if done[row] else "length",
            )
            for row, length in enumerate(lengths)
        ]
        n = self.sampling.n
        return [rows[start : start + n] for start in range(0, self.rows, n)]


def refuse_unsupported(inference: Inference) -> None:
    """Refuse wishes that would be ignored: attention is PyTorch's, precision is the training weights'."""
    wishes = {
        "attention_kernel": (inference.attention_kernel, ("default",)),
        "dtype": (inference.dtype, ("auto",)),
        "kv_cache_dtype": (inference.kv_cache_dtype, ("auto",)),
    }
    for key, (value, known) in wishes.items():
        if value not in known:
            raise ConfigError(
                f'[inference] {key} = "{value}" is not in the pytorch engine. It takes: {", ".join(known)}.'
            )
