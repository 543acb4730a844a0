"""Log-probs of given tokens, computed in slices of rows.

The logits of a batch are tokens × vocabulary floats, gigabytes for a large vocabulary. Only one slice exists at a time;
the backward pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrain.capacity.memory import LOGITS_SLICE
from retrain.modeling.distribution import shape_logits
from retrain.modeling.policy import Policy
from retrain.modeling.triton_internals import runs_triton
from retrain.types import Sampling

# Maximum bytes of float32 logits at once.
SLICE_BYTES = {"cpu": 32 << 20, "cuda": LOGITS_SLICE}

# Maximum bytes of logits and their intermediates kept for the backward pass instead of recomputing them.
KEPT_BYTES = {"cpu": 1 << 30}


def token_logprobs(
    policy: Policy, hidden: Tensor, targets: Tensor, sampling: Sampling, history: History | None
) -> Tensor:
    """Log-prob of each target under the sampled distribution, from the (tokens, size) hidden state before it."""
    rows = max(1, SLICE_BYTES.get(hidden.device.type, 64 << 20) // (4 * policy.vocabulary))
    if _is_fused(policy, sampling):
        weight = policy.causal_lm.get_output_embeddings().weight
        fused: Tensor = TemperedLogprobs.apply(hidden, weight, targets, sampling.temperature, rows)  # type: ignore[no-untyped-call]
        return fused

    def one_slice(states: Tensor, wanted: Tensor, seen: Tensor | None) -> Tensor:
        logits = shape_logits(policy.head(states), sampling, seen, keep=wanted)
        return logits.log_softmax(1).gather(1, wanted[:, None]).squeeze(1)

    # Three float32 copies: raw, tempered and normalized.
    keep = 3 * 4 * len(targets) * policy.vocabulary <= KEPT_BYTES.get(hidden.device.type, 0)
    pieces = []
    for start in range(0, len(targets), rows):
        stop = min(start + rows, len(targets))
        seen = history.seen(start, stop, policy.vocabulary) if history is not None else None
        if hidden.requires_grad and not keep:
            pieces.append(checkpoint(one_slice, hidden[start:stop], targets[start:stop], seen, use_reentrant=False))
        else:
            pieces.append(one_slice(hidden[start:stop], targets[start:stop], seen))
    return torch.cat(pieces)


def only_tempered(sampling: Sampling) -> bool:
    """Whether the sampled distribution is softmax(logits / temperature), without filters or penalties."""
    return (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (1.0, 0, 0.0, 1.0)


def start_compiling(policy: Policy, sampling: Sampling) -> None:
    """Compile the kernels of `token_logprobs` in the background, if this policy needs them."""
    if _is_fused(policy, sampling) and runs_triton(policy.device):
        from retrain.modeling import logprob_kernels  # noqa: PLC0415  (Triton exists only with CUDA)

        weight = policy.causal_lm.get_output_embeddings().weight
        logprob_kernels.start_compiling(policy.device, weight.dtype, policy.vocabulary, weight.requires_grad)


def _is_fused(policy: Policy, sampling: Sampling) -> bool:
    """Whether log-probs are computed together with their gradient: on a GPU, where nothing is filtered."""
    return policy.device.type == "cuda" and policy.has_plain_head and only_tempered(sampling)


class TemperedLogprobs(torch.autograd.Function):
    """log softmax(hidden · Wᵀ / temperature) at the targets.

    Logits stay in the model's precision, without float32 copies. A token's gradient is a multiple of a vector that
    depends on its logits only: it is computed with them, and the backward pass does not need them again. Only a head
    that is trained does.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int) -> Tensor:
        """Slice by slice."""
        normalize, differentiate = _fused_functions(hidden.device)
        logprobs, normalizers = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        directions = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        for at in range(0, len(targets), rows):
            part = slice(at, at + rows)
            logits = hidden[part] @ weight.T
            logprobs[part], normalizers[part] = normalize(logits, targets[part], temperature)
            if directions is not None:
                torch.mm(
                    differentiate(logits, targets[part], normalizers[part], temperature), weight, out=directions[part]
                )
        ctx.temperature, ctx.rows, ctx.has_directions = temperature, rows, directions is not None
        ctx.save_for_backward(*([directions] if directions is not None else [hidden, weight, targets, normalizers]))
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(one-hot - softmax) · gradient / temperature, slice by slice, back through the head."""
        if ctx.has_directions:
            (directions,) = ctx.saved_tensors
            return (directions.float() * gradient[:, None]).to(directions.dtype), None, None, None, None
        hidden, weight, targets, normalizers = ctx.saved_tensors
        _, differentiate = _fused_functions(hidden.device)
        result = torch.empty_like(hidden)
        # Accumulated in float32, like the gradients of micro-batches.
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(targets), ctx.rows):
            part = slice(at, at + ctx.rows)
            logits = hidden[part] @ weight.T
            slope = differentiate(logits, targets[part], normalizers[part], ctx.temperature, gradient[part])
            torch.mm(slope, weight, out=result[part])
            of_weight += slope.T @ hidden[part]
        return result, of_weight.to(weight.dtype), None, None, None


def _normalize(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    tempered = logits.float() / temperature
    normalizers = tempered.logsumexp(1)
    return tempered.gather(1, targets[:, None]).squeeze(1) - normalizers, normalizers


def _differentiate(
    logits: Tensor, targets: Tensor, normalizers: Tensor, temperature: float, gradient: Tensor | None = None
) -> Tensor:
    """The derivative of the log-probs with respect to the logits, times a gradient."""
    probabilities = (logits.float() / temperature - normalizers[:, None]).exp()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    slope = (tokens[None, :] == targets[:, None]).float() - probabilities
    scale = (1.0 if gradient is None else gradient[:, None]) / temperature
    return (slope * scale).to(logits.dtype)


def _fused_functions(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both functions as kernels where Triton runs, else as above."""
    if not runs_triton(device):
        return _normalize, _differentiate
    from retrain.modeling import logprob_kernels  # noqa: PLC0415  (Triton exists only with CUDA)

    return logprob_kernels.normalize, logprob_kernels.differentiate


class History:
    """Tokens before each predicted one, for the repetition penalty."""

    def __init__(self, sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> None:
        self.sequences = sequences
        # (sequence, number of tokens before) of every predicted token, in the row order of `token_logprobs`.
        self.rows = [
            (i, t) for i, (s, p) in enumerate(zip(sequences, prompt_lengths, strict=True)) for t in range(p, len(s))
        ]

    def seen(self, start: int, stop: int, vocabulary: int) -> Tensor:
        """A (rows, vocabulary) mask for a slice of rows."""
        mask = torch.zeros(stop - start, vocabulary, dtype=torch.bool, device=self.sequences[0].device)
        for row, (sequence, before) in enumerate(self.rows[start:stop]):
            mask[row, self.sequences[sequence][:before]] = True
        return mask
