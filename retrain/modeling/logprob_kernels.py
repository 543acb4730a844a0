"""Triton kernels for the log-probs of tokens and their derivatives, over a slice of logits."""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

# Vocabulary entries per iteration or program.
BLOCK = 4096
WARPS = 8


@triton.jit
def _normalize(logits, targets, logprobs, normalizers, temperature, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    # Each lane has its own running maximum and sum: one reduction per row instead of one per block.
    most = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    top = tl.max(most, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(normalizers + row, normalizer)
    tl.store(logprobs + row, chosen - normalizer)


@triton.jit
def _differentiate(
    logits, targets, normalizers, gradient, temperature, vocabulary, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    at = logits + row * vocabulary + tokens
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    slope = (tokens == tl.load(targets + row)).to(tl.float32) - tl.exp(x - tl.load(normalizers + row))
    scale = 1.0 / temperature
    if HAS_GRADIENT:
        scale *= tl.load(gradient + row)
    tl.store(at, (slope * scale).to(logits.dtype.element_ty), mask=inside)


def normalize(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the log-sum-exp of each row."""
    rows, vocabulary = logits.shape
    logprobs, normalizers = (torch.empty(rows, device=logits.device) for _ in range(2))
    _normalize[(rows,)](
        logits, targets, logprobs, normalizers, float(temperature), vocabulary, BLOCK=BLOCK, num_warps=WARPS
    )
    return logprobs, normalizers


def differentiate(
    logits: Tensor, targets: Tensor, normalizers: Tensor, temperature: float, gradient: Tensor | None = None
) -> Tensor:
    """The derivative of the log-probs with respect to the logits, times a gradient. Overwrites the logits."""
    rows, vocabulary = logits.shape
    _differentiate[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, targets, normalizers, normalizers if gradient is None else gradient, float(temperature), vocabulary,
        HAS_GRADIENT=gradient is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logits


def start_compiling(device: torch.device, dtype: torch.dtype, vocabulary: int, has_gradient: bool) -> None:
    """Launch both once, in the background, on a row of zeros."""

    def launch_both() -> None:
        with torch.cuda.device(device):
            logits, targets = torch.zeros(1, vocabulary, dtype=dtype, device=device), torch.zeros(1, device=device)
            _, normalizers = normalize(logits, targets.long(), 1.0)
            differentiate(logits, targets.long(), normalizers, 1.0, normalizers if has_gradient else None)

    threading.Thread(target=launch_both, name="retrain-logprobs", daemon=True).start()
