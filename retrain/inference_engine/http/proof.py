"""Verifies that a server sampled from the newest policy, by comparing its log-probs with the trainer's.

The trainer scores a few sampled tokens under the newest weights, the previous ones and the base model. Server and
trainer round differently, so the question is not whether the log-probs are equal but which weights fit them best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.capacity.memory import MICRO_BATCH
from retrain.modeling.distribution import shape_logits
from retrain.modeling.logprobs import token_logprobs
from retrain.modeling.packing import MicroBatch, pack, predicting_states, split_by_tokens, split_rows
from retrain.modeling.policy import Policy
from retrain.types import Datum, FloatArray, IntArray, Sampling

# Standard errors by which older weights must fit better to stop the run; and the largest usable standard error.
MIN_ERRORS, MAX_ERROR = 3.0, 0.15
# Standard errors, and share of the inverse temperature, by which a server must deviate to stop the run.
TEMPERATURE_ERRORS, MIN_SHARPENING = 5.0, 0.1

# Tokens whose full distribution is in memory at once.
SURPLUS_SLICE = 256

State = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A prompt and a completion, with the log-probs that the server reported."""

    prompt_ids: IntArray
    token_ids_T: IntArray
    logprobs_T: FloatArray


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison. `proof` is 1 for the newest weights, 0 for older ones, None if undecidable."""

    proof: float | None
    mismatch_mean: float
    mismatch_max: float
    mismatch_kl: float
    wrong: str
    """What the server seems to sample from, if not the newest policy; else empty."""


def identify_weights(
    server_T: FloatArray, newest_T: FloatArray, older: Mapping[str, FloatArray], limit: float
) -> Verdict:
    """Which weights log-probs come from, by least squares along the line from the newest to older ones.

    gap = server - newest = share · (older - newest) + noise; the share is 0 for the newest weights and 1 for the older
    ones, with a standard error of sigma / |older - newest|. A mean gap above `limit` fits neither.
    """
    gap = np.asarray(server_T, np.float64) - newest_T
    shares, wrong = [], ""
    for name, older_T in older.items():
        line = np.asarray(older_T, np.float64) - newest_T
        power = float(line @ line)
        if power == 0.0:
            continue
        share = float(gap @ line) / power
        error = math.sqrt(float(np.mean((gap - share * line) ** 2)) / power)
        if error > MAX_ERROR:
            continue
        shares.append(share)
        if share - MIN_ERRORS * error > 0.5:
            closest = not wrong or np.abs(server_T - older_T).mean() < np.abs(server_T - older[wrong]).mean()
            wrong = name if closest else wrong
    mean = float(np.abs(gap).mean())
    kl = float((np.exp(-gap.clip(-20, 20)) - 1 + gap.clip(-20, 20)).mean())
    if not wrong and mean > limit:
        wrong = "neither the newest adapter, nor the one before, nor the base model"
    return Verdict(1 - max(shares) if shares else None, mean, float(np.abs(gap).max()), kl, wrong)


@dataclass(frozen=True)
class Surplus:
    """How much likelier sampled tokens are than expected: Σ log p - E[log p], and its variance.

    Log-probs from before temperature and filtering cannot reveal a wrong sampling distribution; this does.
    """

    total: float = 0.0
    variance: float = 0.0

    def __add__(self, other: Surplus) -> Surplus:
        return Surplus(self.total + other.total, self.variance + other.variance)

    @property
    def sharpening(self) -> float:
        """Relative deviation of the inverse temperature, if significant; else 0."""
        if not self.variance or abs(self.total) < TEMPERATURE_ERRORS * math.sqrt(self.variance):
            return 0.0
        # dE[log p]/dβ = Var[log p] at β = 1, the inverse temperature relative to the requested one.
        share = self.total / self.variance
        return share if abs(share) > MIN_SHARPENING else 0.0


class PolicyScorer:
    """Scores given tokens under a policy, with its current adapter or another one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def logprobs(self, rows: Sequence[Row], sampling: Sampling) -> list[FloatArray]:
        """One array per row, under the distribution of `sampling`."""
        return self.logprobs_under(rows, (sampling,))[0]

    @torch.no_grad()
    def logprobs_under(self, rows: Sequence[Row], samplings: Sequence[Sampling]) -> list[list[FloatArray]]:
        """The same under several distributions, with one forward pass."""
        scored: list[list[FloatArray]] = [[np.empty(0)] * len(rows) for _ in samplings]
        for numbers, packed, states in self._passes(rows, samplings):
            lengths = [len(rows[at].token_ids_T) for at in numbers]
            for of_sampling, sampling in zip(scored, samplings, strict=True):
                values = token_logprobs(self.policy, states, packed.targets, sampling, packed.history)
                for at, row_T in zip(numbers, split_rows(values, lengths), strict=True):
                    of_sampling[at] = row_T
        return scored

    @torch.no_grad()
    def surplus(self, rows: Sequence[Row], sampling: Sampling) -> Surplus:
        """How well the tokens fit the requested distribution."""
        found = Surplus()
        for _, packed, states in self._passes(rows, (sampling,)):
            for at in range(0, len(states), SURPLUS_SLICE):
                part = slice(at, at + SURPLUS_SLICE)
                wanted = packed.targets[part]
                seen = None
                if packed.history is not None:
                    seen = packed.history.seen(at, min(at + SURPLUS_SLICE, len(states)), self.policy.vocabulary)
                logprobs = shape_logits(self.policy.head(states[part]), sampling, seen, keep=wanted).log_softmax(1)
                weights = logprobs.exp()
                kept = torch.where(weights > 0, logprobs, 0.0).double()
                mean = (weights * kept).sum(1)
                variance = (weights * (kept - mean[:, None]) ** 2).sum(1)
                chosen = kept.gather(1, wanted[:, None]).squeeze(1)
                found += Surplus(float((chosen - mean).sum()), float(variance.sum()))
        return found

    def _passes(
        self, rows: Sequence[Row], samplings: Sequence[Sampling]
    ) -> Iterator[tuple[list[int], MicroBatch, Tensor]]:
        """Micro-batches: row indices, the packed input, and the hidden states that predict the tokens."""
        datums = [
            Datum(r.prompt_ids, r.token_ids_T, r.logprobs_T, r.logprobs_T, np.ones(len(r.token_ids_T), bool))
            for r in rows
        ]
        numbered = {id(datum): at for at, datum in enumerate(datums)}
        penalised = any(one.repetition_penalty != 1.0 for one in samplings)
        for batch in split_by_tokens(datums, MICRO_BATCH):
            packed = pack(batch, self.policy.device, penalised, share=not self.policy.attention_fallback_reason)
            yield [numbered[id(datum)] for datum in batch], packed, predicting_states(self.policy, packed)

    def snapshot(self) -> State:
        """A copy of the adapter."""
        return {name: tensor.clone() for name, tensor in self.policy.adapter_state().items()}

    def base(self) -> State:
        """An adapter that changes nothing."""
        state = self.policy.adapter_state()
        return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in state.items()}

    @contextmanager
    def using(self, state: State) -> Iterator[None]:
        """Swap in a different adapter state for the duration of the context."""
        own = self.snapshot()
        try:
            self.policy.load_adapter_state(state)
            yield
        finally:
            self.policy.load_adapter_state(own)
