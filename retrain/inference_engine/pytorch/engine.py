"""Samples in this process from the weights that are being trained.

All completions of a step form one batch. A prompt is prefilled once per group; completions leave the batch as they
finish. Sampling depends on the seed and the logits only, not on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from retrain.capacity.sampling import Merging
from retrain.config.schema import Inference
from retrain.errors import RolloutError
from retrain.inference_engine import Deliver, Progress, Turn, Turns
from retrain.inference_engine.pytorch.choice import Choice, choose, make_decoder, make_model
from retrain.inference_engine.pytorch.decoder import Row, RunningBatch, SampledRow
from retrain.modeling.policy import Policy
from retrain.modeling.tokens import Tokenizer
from retrain.types import Completion, IntArray, Sampling


def build(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> PyTorchEngine:
    """The engine for this policy, with continuous batching where CUDA graphs run."""
    kind = PyTorchEngine if choose(policy, inference).eager_reason else StreamingPyTorchEngine
    return kind(policy, inference, tokenizer, progress)


class PyTorchEngine:
    """An InferenceEngine over a Policy."""

    def __init__(self, policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.progress = progress
        self.shares_prompts = inference.prefix_caching
        self.is_sampling = False
        self._make(choose(policy, inference))

    @property
    def description(self) -> str:
        """One-line description."""
        return self.decoder.description

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample completions, all prompts at once or as many as fit into memory."""
        rows = self._all_rows(prompts, sampling)
        with torch.inference_mode(), self._merged():
            drawn = self.decoder.draw(rows, sampling, self.progress)
        completions = self._completions(drawn)
        return [completions[start : start + sampling.n] for start in range(0, len(rows), sampling.n)]

    def sync(self, weights: object) -> None:
        """Merge the newest adapter."""
        if self.model is not None:
            self.model.refresh()

    def sizes(self) -> dict[str, int]:
        """The decoder's batch limits, and whether the adapter is merged in place."""
        return self.decoder.sizes() | {"in_place": int(self.choice.merging == "in-place")}

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        """Restore the limits of an earlier process, and how it merged the adapter, whatever memory is free now."""
        limits = {key: value for key, value in sizes.items() if key != "in_place"}
        merging: Merging = "in-place" if sizes.get("in_place") else "copies"
        is_possible = self.choice.merging in (merging, "never") or self._merge_otherwise(merging)
        return self.decoder.restore_sizes(limits) and is_possible

    def release_memory(self) -> None:
        """Free KV cache and CUDA graphs, unless a batch uses them; the next batch allocates them again."""
        with self.policy.turns:
            if not self.is_sampling:
                self.decoder.release()

    def shutdown(self) -> None:
        """Free KV cache and CUDA graphs."""
        self.decoder.release()

    def _make(self, choice: Choice) -> None:
        self.choice = choice
        self.model = make_model(self.policy, choice)
        self.decoder = make_decoder(self.policy, self.model, choice, self.shares_prompts)

    def _merge_otherwise(self, merging: Merging) -> bool:
        """Merge the adapter in this way from now on; False if memory or training during sampling does not allow it."""
        if merging == "in-place" and self.policy.is_trained_while_sampled:
            return False
        chosen = self.choice
        self.decoder.release()
        try:
            self._make(replace(chosen, merging=merging))
        except torch.OutOfMemoryError:
            self._make(chosen)
            return False
        return True

    def _merged(self) -> AbstractContextManager[None]:
        return self.model.merged() if self.model is not None else nullcontext()

    def _all_rows(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[Row]:
        return [
            self._row(prompt, index, sampling, sampling.first + index * sampling.n + copy)
            for index, prompt in enumerate(prompts)
            for copy in range(sampling.n)
        ]

    def _row(self, prompt: IntArray, index: int, sampling: Sampling, number: int) -> Row:
        context = self.policy.context_length
        if not 0 < len(prompt) < context:
            raise RolloutError(f"prompt {index} has {len(prompt)} tokens; the context holds {context}.")
        # A completion ends at the end of the context.
        return Row(prompt, sampling.seed, number, min(sampling.max_tokens, context - len(prompt)))

    def _completions(self, drawn: Sequence[SampledRow]) -> list[Completion]:
        # Some versions of transformers decode an empty list to one text.
        texts = self.tokenizer.batch_decode([row.tokens for row in drawn], skip_special_tokens=True) if drawn else []
        return [
            Completion(
                token_ids_T=row.tokens.astype(np.int64),
                logprobs_T=row.logprobs.astype(np.float32),
                entropies_T=row.entropies.astype(np.float32),
                text=text,
                finish_reason="stop" if row.stopped else "length",
            )
            for row, text in zip(drawn, texts, strict=True)
        ]


class StreamingPyTorchEngine(PyTorchEngine):
    """A PyTorchEngine with continuous batching: turns of conversations join and leave the running batch."""

    def generate_each(
        self, prompts: Sequence[IntArray], sampling: Sampling, deliver: Deliver
    ) -> list[list[Completion]]:
        """Sample completions; those of a prompt are delivered as soon as all of them are done."""
        batch = self.decoder
        assert isinstance(batch, RunningBatch)
        rows = self._all_rows(prompts, sampling)
        groups = [rows[start : start + sampling.n] for start in range(0, len(rows), sampling.n)]
        left = dict(enumerate(groups))
        drawn: dict[Row, SampledRow] = {}
        completions_P: list[list[Completion]] = [[] for _ in prompts]
        with self._sampling():
            with self.policy.turns, torch.inference_mode():
                batch.start(sampling)
                batch.add(rows)
            while left:
                with self.policy.turns, torch.inference_mode():
                    drawn |= batch.advance()
                for at in [at for at, group in left.items() if all(row in drawn for row in group)]:
                    completions_P[at] = self._completions([drawn[row] for row in left.pop(at)])
                    deliver(at, completions_P[at])
                self.progress("sampling", len(drawn), len(rows))
        return completions_P

    def serve(self, turns: Turns) -> None:
        """Sample turns as they arrive and resolve each as soon as it is done, until the queue is closed."""
        batch = self.decoder
        assert isinstance(batch, RunningBatch)
        waiting: dict[Row, Turn] = {}
        served = 0
        with self._sampling():
            while (fresh := turns.take(wait=not waiting)) or waiting:
                rows = self._rows_of(fresh)
                with self.policy.turns, torch.inference_mode():
                    if fresh and not waiting:
                        batch.start(fresh[0].sampling)
                    batch.add(rows)
                    waiting |= rows
                    drawn = batch.advance()
                for row, completion in zip(drawn, self._completions(list(drawn.values())), strict=True):
                    waiting.pop(row).answer.set_result(completion)
                served += len(drawn)
                self.progress("sampling", served, served + len(waiting))

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Context for a batch during which other threads may train; its memory is not released."""
        self.is_sampling = True
        try:
            with torch.no_grad(), self._merged():
                yield
        finally:
            self.is_sampling = False

    def _rows_of(self, turns: Sequence[Turn]) -> dict[Row, Turn]:
        """A row per turn; a turn that does not fit into the context fails with the error."""
        rows: dict[Row, Turn] = {}
        for index, turn in enumerate(turns):
            try:
                rows[self._row(turn.prompt_ids, index, turn.sampling, 0)] = turn
            except RolloutError as error:
                turn.answer.set_exception(error)
        return rows
