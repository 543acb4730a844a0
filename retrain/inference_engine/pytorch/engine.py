"""Samples in this process from the very weights that are being trained.

All completions of a step are one batch. A prompt is prefilled once for its whole group; completions leave the batch as
they finish. What is drawn depends on the seed and the logits alone, not on who else is still in the batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from retrain.backends.local.compiling import compile_layers
from retrain.backends.local.model import Policy
from retrain.config.schema import Inference
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine import Progress
from retrain.inference_engine.pytorch.eager import EagerDecoder
from retrain.inference_engine.pytorch.sampler import Drawn
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.types import Completion, IntArray, Sampling


class PyTorchEngine:
    """An InferenceEngine over a Policy."""

    def __init__(self, policy: Policy, inference: Inference, tokenizer: Any, progress: Progress) -> None:
        refuse_unsupported(inference)
        self.policy = policy
        self.tokenizer = tokenizer
        self.share_prefill = inference.prefix_caching
        self.progress = progress
        self.model = SamplingModel(policy)
        self.decoder = self._choose_decoder()

    def _choose_decoder(self) -> Any:
        """CUDA graphs with our kernels on a GPU that has Triton; plain PyTorch everywhere else."""
        if self.policy.device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return EagerDecoder(self.model)
        from retrain.inference_engine.pytorch.graphs import GraphDecoder  # noqa: PLC0415  (Triton exists only with CUDA)

        compile_layers(self.model.causal_lm)
        return GraphDecoder(self.model)

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Draw completions, all prompts at once, in waves where memory asks for it."""
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.policy.context_length:
                raise RolloutError(
                    f"prompt {index} has {len(prompt)} tokens; the context holds {self.policy.context_length}."
                )
        completions: list[list[Completion]] = []
        with torch.inference_mode():
            for wave in self._waves(prompts, sampling):
                first_row = len(completions) * sampling.n
                drawn = self.decoder.draw(wave, sampling, first_row, self.share_prefill, self.progress)
                completions += self._completions(drawn, sampling.n)
        return completions

    def sync(self, weights: object) -> None:
        """Fold the trainer's newest adapter in."""
        self.model.refresh()

    def shutdown(self) -> None:
        """Free cache and graphs."""
        self.decoder.release()

    def _waves(self, prompts: Sequence[IntArray], sampling: Sampling) -> Iterator[Sequence[IntArray]]:
        """Cut the prompts where the cache of all of them would not fit into free memory."""
        most = self._prompts_that_fit(max(map(len, prompts)) + sampling.max_tokens, sampling.n)
        for start in range(0, len(prompts), most):
            yield prompts[start : start + most]

    def _prompts_that_fit(self, tokens: int, group: int) -> int:
        if self.policy.device.type != "cuda":
            return 1 << 30
        row_bytes = tokens * self.policy.cache_bytes_per_token
        free, _ = torch.cuda.mem_get_info(self.policy.device)
        held = torch.cuda.memory_reserved(self.policy.device) - torch.cuda.memory_allocated(self.policy.device)
        room = free + held + self.decoder.cache_bytes
        # Moving rows copies one layer, and logits need room as well: three quarters is what may be cache.
        fitting = int(0.75 * room) // (row_bytes * group)
        if fitting < 1:
            raise RolloutError(
                f"the KV cache of one group does not fit: {group} completions × {tokens} tokens × "
                f"{row_bytes / tokens / 1024:.0f} KiB a token = {group * row_bytes / 2**30:.1f} GiB, and "
                f"{room / 2**30:.1f} GiB are free.  Try: a smaller group_size or max_tokens."
            )
        return int(fitting)

    def _completions(self, drawn: Drawn, n: int) -> list[list[Completion]]:
        """What was drawn, grouped by prompt."""
        lengths, stopped = drawn.lengths.tolist(), drawn.stopped.tolist()
        width = max(lengths)
        tokens, logprobs, entropies = (
            tensor[:, :width].cpu().numpy() for tensor in (drawn.tokens, drawn.logprobs, drawn.entropies)
        )
        texts = self.tokenizer.batch_decode(
            [tokens[row, :length] for row, length in enumerate(lengths)], skip_special_tokens=True
        )
        rows = [
            Completion(
                token_ids_T=tokens[row, :length].astype(np.int64),
                logprobs_T=logprobs[row, :length].astype(np.float32),
                entropies_T=entropies[row, :length].astype(np.float32),
                text=texts[row],
                finish_reason="stop" if stopped[row] else "length",
            )
            for row, length in enumerate(lengths)
        ]
        return [rows[start : start + n] for start in range(0, len(rows), n)]


def refuse_unsupported(inference: Inference) -> None:
    """Refuse wishes that would be ignored: attention is PyTorch's or ours, precision is the training weights'."""
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
