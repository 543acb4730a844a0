"""A quantized base on a GPU: compiled layers, CUDA graphs and 4-bit kernels against the same model in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny import config_for, datums_of, learner_for, policy_for, random_datums, random_prompts

from retrain.backends.local.learner import Learner
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.quantization import quantized_layers
from retrain.types import Sampling

from .conftest import engine_on

pytestmark = pytest.mark.gpu

KINDS = pytest.mark.parametrize("kind", ["int8", "nf4"])


@pytest.fixture(autouse=True)
def package() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the extra quant")


def build(model: Path, kind: str, device: str = "cuda", **overrides: Any) -> tuple[Learner, PyTorchEngine]:
    config = config_for(model, model__quantization=kind, training__temperature=1.0, **overrides)
    policy = policy_for(config, device=device)
    return learner_for(policy, config), engine_on(policy, config)


@KINDS
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sampler_and_trainer_agree_while_the_adapter_learns(broad: Path, kind: str, dtype: str) -> None:
    learner, engine = build(broad, kind, model__dtype=dtype, training__lr=1e-3)
    assert "CUDA graphs" in engine.description and f"{kind} weights" in engine.description
    prompts, tolerance = random_prompts((9, 40, 3, 17)), 2e-2 if dtype == "bf16" else 1e-3
    for step in range(4):
        engine.sync(learner.policy)
        datums = datums_of(prompts, engine.generate(prompts, learner.sampling), seed=step)
        metrics = learner.step(datums, step)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=tolerance)
        assert metrics["kl_sample_train"] == pytest.approx(0.0, abs=tolerance)


@KINDS
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_batches_of_every_size_agree_with_the_trainer(broad: Path, kind: str, rows: int) -> None:
    # Few rows use a fused 4-bit kernel, many dequantize the matrix first.
    learner, engine = build(broad, kind, model__dtype="bf16", training__lr=1e-9)
    prompts = random_prompts((12,))
    sampling = Sampling(max_tokens=24, n=rows, temperature=1.0, seed=2)
    metrics = learner.step(datums_of(prompts, engine.generate(prompts, sampling)), 0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=2e-2)


@KINDS
def test_gradients_are_those_of_the_cpu(broad: Path, kind: str) -> None:
    found, stored, logprobs = [], [], []
    datums = random_datums(6 * [(20, 30)])
    for device in ("cpu", "cuda"):
        learner, _ = build(broad, kind, device, model__dtype="fp32", loss__ratio_cap=0.0)
        stored.append([layer.weight.cpu() for layer in quantized_layers(learner.policy.adapted)])
        with torch.no_grad():
            logprobs.append(learner.logprobs(learner.pack(datums)).cpu())
        learner._backward(learner.split(datums))
        found.append({n: p.grad.cpu() for n, p in learner.policy.adapted.named_parameters() if p.grad is not None})
    # bitsandbytes may round a tie differently on each device.
    assert kind == "nf4" or all(torch.equal(*pair) for pair in zip(*stored, strict=True))
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=1e-3)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=2e-3 * float(gradient.abs().max()))


@KINDS
def test_quantized_matrices_take_the_planned_memory(broad: Path, kind: str) -> None:
    learner, _ = build(broad, kind, model__dtype="bf16")
    layers = quantized_layers(learner.policy.adapted)
    values = sum(layer.in_features * layer.out_features for layer in layers)
    held = sum(layer.weight.nbytes + layer.scales.nbytes for layer in layers)
    assert held / values == pytest.approx({"int8": 1.0, "nf4": 0.5625}[kind], rel=0.05)


@KINDS
def test_two_runs_give_the_same_adapter_to_the_bit(broad: Path, kind: str) -> None:
    states = []
    for _ in range(2):
        learner, engine = build(broad, kind, model__dtype="bf16", training__lr=1e-3)
        prompts = random_prompts((9, 40, 3, 17))
        for step in range(2):
            engine.sync(learner.policy)
            learner.step(datums_of(prompts, engine.generate(prompts, learner.sampling), seed=step), step)
        states.append([tensor.cpu() for tensor in learner.policy.adapter_state().values()])
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@KINDS
def test_recomputed_layers_keep_no_activations(broad: Path, kind: str) -> None:
    peaks = []
    for recompute in (False, True):
        learner, _ = build(broad, kind, model__dtype="bf16", memory__gradient_checkpointing=recompute)
        datums = random_datums(16 * [(64, 400)])
        learner.step(datums, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        learner.step(datums, 1)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del learner
        torch.cuda.empty_cache()
    assert peaks[1] < peaks[0]
