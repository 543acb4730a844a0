"""From logits to the sampled distribution, shared by engine and trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from retrain.types import Sampling


def shape_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """Logits of the sampled distribution, in float32 and -inf outside the kept support.

    `seen` marks tokens already in the row, for the repetition penalty. `keep` is one token per row that always stays in
    the support: rounding may move the trainer's cutoff slightly from the engine's.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1.0:
        assert seen is not None
        penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if sampling.is_greedy:
        likeliest = logits.argmax(1, keepdim=True)
        return torch.full_like(logits, float("-inf")).scatter(1, likeliest, 0.0)
    logits = logits / sampling.temperature
    dropped = _outside_support(logits.detach(), sampling)
    if dropped is None:
        return logits
    if keep is not None:
        dropped = dropped.scatter(1, keep[:, None], False)
    return logits.masked_fill(dropped, float("-inf"))


def _outside_support(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """Tokens removed by top-k, top-p and min-p, applied in this order."""
    dropped: Tensor | None = None
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        dropped = logits < least
    if sampling.top_p < 1.0:
        left = logits if dropped is None else logits.masked_fill(dropped, float("-inf"))
        ordered, order = left.sort(dim=1, descending=True)
        mass = ordered.softmax(1)
        # A token stays if the mass before it is below top_p, so the likeliest one always stays.
        tail = mass.cumsum(1) - mass >= sampling.top_p
        dropped = _union(dropped, torch.zeros_like(tail).scatter(1, order, tail))
    if sampling.min_p > 0.0:
        left = logits if dropped is None else logits.masked_fill(dropped, float("-inf"))
        probabilities = left.softmax(1)
        dropped = _union(dropped, probabilities < sampling.min_p * probabilities.max(1, keepdim=True).values)
    return dropped


def _union(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a | b


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row by inverting the CDF at `uniforms`; returns ids, log-probs and entropies."""
    logprobs = logits.log_softmax(1)
    probabilities = logprobs.exp()
    # Double precision: a float32 cumulative sum over a large vocabulary would lose rare tokens.
    cumulative = probabilities.double().cumsum(1)
    target = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    # "right" skips tokens of zero mass, whose cumulative value equals that of the token before them.
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1).squeeze(1)
    # 0 · -inf would be NaN.
    entropies = -(probabilities * logprobs.clamp_min(-1e4)).sum(1)
    return ids, logprobs.gather(1, ids[:, None]).squeeze(1), entropies
