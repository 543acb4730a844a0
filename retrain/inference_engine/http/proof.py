"""Proof that a server sampled from the newest policy: its log-probs are compared with the trainer's own.

The trainer scores a few sampled tokens under the newest weights, the ones before, and the base model's. Server and
trainer compute differently, so the question is not whether the log-probs agree but which weights they agree with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.logprobs import token_logprobs
from retrain.backends.local.model import Policy
from retrain.backends.local.packing import pack, predicting_states, split_by_tokens
from retrain.capacity import MICRO_BATCH
from retrain.types import Datum, FloatArray, IntArray, Sampling

# Standard errors by which older weights must fit better before a run is stopped; and the largest one worth judging by.
SURE, TOO_VAGUE = 3.0, 0.15

State = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A completion after its prompt, with what the server said of its tokens."""

    prompt_ids: IntArray
    token_ids_T: IntArray
    logprobs_T: FloatArray


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to. `proof` is 1 for the newest weights and 0 for older ones; None: no telling apart."""

    proof: float | None
    mismatch_mean: float
    mismatch_max: float
    mismatch_kl: float
    wrong: str
    """What the server seems to sample from, where that is not the newest policy."""


def judge(server_T: FloatArray, newest_T: FloatArray, older: Mapping[str, FloatArray], limit: float) -> Verdict:
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
        if error > TOO_VAGUE:
            continue
        shares.append(share)
        if share - SURE * error > 0.5:
            closest = not wrong or np.abs(server_T - older_T).mean() < np.abs(server_T - older[wrong]).mean()
            wrong = name if closest else wrong
    mean = float(np.abs(gap).mean())
    kl = float((np.exp(-gap.clip(-20, 20)) - 1 + gap.clip(-20, 20)).mean())
    if not wrong and mean > limit:
        wrong = "neither the newest adapter, nor the one before, nor the base model"
    return Verdict(1 - max(shares) if shares else None, mean, float(np.abs(gap).max()), kl, wrong)


class PolicyScorer:
    """Log-probs of given tokens under a policy, with its adapter as it is or with other values in it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def logprobs(self, rows: Sequence[Row], sampling: Sampling) -> list[FloatArray]:
        """One array a row, under the distribution that `sampling` describes."""
        return self.logprobs_under(rows, (sampling,))[0]

    @torch.no_grad()
    def logprobs_under(self, rows: Sequence[Row], samplings: Sequence[Sampling]) -> list[list[FloatArray]]:
        """The same under several distributions, by one pass over the model."""
        datums = [
            Datum(r.prompt_ids, r.token_ids_T, r.logprobs_T, r.logprobs_T, np.ones(len(r.token_ids_T), bool))
            for r in rows
        ]
        numbered = {id(datum): at for at, datum in enumerate(datums)}
        scored: list[list[FloatArray]] = [[np.empty(0)] * len(rows) for _ in samplings]
        device, penalised = self.policy.device, any(one.repetition_penalty != 1.0 for one in samplings)
        for batch in split_by_tokens(datums, MICRO_BATCH):
            packed = pack(batch, device, penalised, share=not self.policy.own_attention)
            edges = np.cumsum([len(d.completion_ids_T) for d in batch])[:-1]
            states = predicting_states(self.policy, packed)
            for of_sampling, sampling in zip(scored, samplings, strict=True):
                values = token_logprobs(self.policy, states, packed.targets, sampling, packed.history)
                for datum, part in zip(batch, np.split(values.float().cpu().numpy(), edges), strict=True):
                    of_sampling[numbered[id(datum)]] = part
        return scored

    def snapshot(self) -> State:
        """A copy of the adapter."""
        return {name: tensor.clone() for name, tensor in self.policy.adapter_state().items()}

    def base(self) -> State:
        """An adapter that changes nothing."""
        state = self.policy.adapter_state()
        return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in state.items()}

    @contextmanager
    def holding(self, state: State) -> Iterator[None]:
        """Score with other values in the adapter for a while."""
        own = self.snapshot()
        try:
            self.policy.load_adapter_state(state)
            yield
        finally:
            self.policy.load_adapter_state(own)
