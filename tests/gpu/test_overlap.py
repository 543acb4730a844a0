"""Sampling and training at the same time on one GPU, in two streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.sharing import take_steps

from retrain.types import Sampling

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(max_tokens=400, n=4, temperature=1.0)


def test_an_overlapped_step_is_the_sequential_one_up_to_rounding(broad: Path) -> None:
    options = {
        "device": "cuda",
        "stop_every": 200,
        "model__dtype": "fp32",
        "training__lr": 1e-5,
        "training__max_tokens": 400,
    }
    sequential = take_steps(broad, False, SAMPLING, prompts=16, steps=1, **options)
    overlapped = take_steps(broad, True, SAMPLING, prompts=16, steps=1, **options)
    assert overlapped.tokens == sequential.tokens, "training changes nothing that is sampled"
    for ours, theirs in zip(overlapped.gradients, sequential.gradients, strict=True):
        assert float((ours - theirs).norm()) <= 1e-3 * float(theirs.norm())
    for key in ("loss", "grad_norm", "ratio_mean"):
        assert overlapped.metrics[0][key] == pytest.approx(sequential.metrics[0][key], rel=1e-3, abs=1e-5)


def test_overlapped_steps_repeat_to_the_bit(broad: Path) -> None:
    options = {"device": "cuda", "stop_every": 200, "training__lr": 1e-3, "training__max_tokens": 400}
    # "auto" does without deterministic kernels for so narrow a model: attention is much of its work.
    options["training__deterministic"] = True
    first, second = (take_steps(broad, True, SAMPLING, prompts=16, steps=3, **options) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.metrics == second.metrics
    assert all(torch.equal(tensor, second.adapter[name]) for name, tensor in first.adapter.items())
