"""The KL penalty: its formula, who the reference is, how it follows the policy, and a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny import config_for, gradients, learner_for, policy_for, random_datums
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain.backends.local.learner import Learner
from retrain.backends.local.loss import divergence
from retrain.modeling.packing import pack

from .test_learner import CPU, plain_logprobs

SIZES = ((3, 9), (11, 2), (1, 17), (6, 6))


def learner(model: Path, **overrides: Any) -> Learner:
    config = config_for(model, **{"loss__ratio_cap": 0.0} | overrides)
    return learner_for(policy_for(config, trained=False), config)


def weights(made: Learner) -> list[Tensor]:
    return [tensor.clone() for tensor in made.policy.adapter_state().values()]


def reference_logprobs(made: Learner) -> Tensor:
    (found,) = made._reference_logprobs([pack(random_datums(SIZES), CPU, with_history=False)])
    assert found is not None
    return found


def test_the_estimator_against_hand_worked_numbers() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.5])
    reference = torch.tensor([-1.0, -1.0, -1.5])
    expected = [0.0, math.e - 2, math.exp(-1) + 1 - 1]
    assert divergence(policy, reference).tolist() == pytest.approx(expected, rel=1e-6)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_the_estimator_is_never_negative_and_always_finite(policy: float, reference: float) -> None:
    found = float(divergence(torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)))
    assert 0 <= found < math.inf


def test_its_mean_over_the_policys_own_draws_is_the_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    expected = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * divergence(policy, reference)).sum()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "whole"])
def test_the_reference_is_the_model_as_it_was_loaded(tiny: Path, rank: int) -> None:
    made = learner(tiny, kl__beta=0.1, model__lora_rank=rank, training__lr=0.05)
    plain = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(plain, d, made.sampling.temperature) for d in random_datums(SIZES)])
    for _ in range(3):
        made.step(random_datums(SIZES))
    before = weights(made)
    torch.testing.assert_close(reference_logprobs(made), expected, rtol=0, atol=5e-5)
    assert all(torch.equal(a, b) for a, b in zip(weights(made), before, strict=True)), "the policy has its place again"


def test_the_penalty_adds_its_gradient_and_its_value(tiny: Path) -> None:
    datums = random_datums(SIZES)
    made = learner(tiny, kl__beta=0.3, training__lr=0.05)
    made.step(datums)
    expected = reference_logprobs(made)
    totals = made._backward([datums])
    found = gradients(made.policy)
    # The same by hand: the loss without a reference, and beta times the estimator's mean.
    packed = made.pack(datums)
    reference, made.reference = made.reference, None
    without = made._backward([datums])
    bare = gradients(made.policy)
    made.optimizer.clear()
    penalty = 0.3 * divergence(made.logprobs(packed), expected).mean()
    penalty.backward()  # type: ignore[no-untyped-call]
    worth = float(penalty.detach())
    for name, gradient in gradients(made.policy).items():
        scale = float(bare[name].abs().max())
        torch.testing.assert_close(found[name], bare[name] + gradient, rtol=0, atol=1e-5 * scale)
    metrics = totals.metrics()
    assert metrics["loss"] == pytest.approx(float(without.metrics()["loss"] or 0) + worth, rel=1e-5)
    assert metrics["kl_ref"] == pytest.approx(worth / 0.3, rel=1e-5)
    assert reference is not None and "kl_ref" not in without.metrics()


@pytest.mark.slow
def test_a_strong_penalty_keeps_the_policy_near(tiny: Path) -> None:
    far = {}
    for beta in (1e-6, 20.0):
        made = learner(tiny, kl__beta=beta, training__lr=0.02)
        metrics = [made.step(random_datums(SIZES), step)["kl_ref"] for step in range(12)]
        far[beta] = metrics[-1]
        assert metrics[0] == pytest.approx(0.0, abs=1e-9)
    assert isinstance(far[20.0], float) and isinstance(far[1e-6], float)
    assert far[20.0] < 0.3 * far[1e-6]


def test_the_reference_follows_in_steps_by_its_share_of_the_policy(tiny: Path) -> None:
    options = {"kl__ref_model_mixup_alpha": 0.75, "kl__ref_model_sync_steps": 2}
    made = learner(tiny, kl__beta=0.1, kl__sync_ref_model=True, **options)
    assert made.reference is not None
    first = [tensor.clone() for tensor in made.reference.tensors]
    made.step(random_datums(SIZES), 0)
    assert all(torch.equal(a, b) for a, b in zip(made.reference.tensors, first, strict=True))
    made.step(random_datums(SIZES), 1)
    for reference, before, policy in zip(made.reference.tensors, first, weights(made), strict=True):
        torch.testing.assert_close(reference, 0.75 * policy + 0.25 * before)


@pytest.mark.parametrize("sync", [False, True])
def test_a_resume_has_the_same_reference_to_the_bit(tiny: Path, tmp_path: Path, sync: bool) -> None:
    options = {"kl__beta": 0.1, "kl__sync_ref_model": sync, "training__lr": 0.05}
    options |= {"kl__ref_model_sync_steps": 2} if sync else {}
    made = learner(tiny, **options)
    for step in range(3):
        made.step(random_datums(SIZES), step)
    made.save(tmp_path)
    other = learner(tiny, **options)
    other.load(tmp_path)
    assert made.step(random_datums(SIZES), 3) == other.step(random_datums(SIZES), 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(made), weights(other), strict=True))
    assert made.step(random_datums(SIZES), 4) == other.step(random_datums(SIZES), 4)


def test_dropout_never_touches_the_reference(tiny: Path) -> None:
    made = learner(tiny, kl__beta=0.1, lora__dropout=0.5, training__lr=0.05)
    made.step(random_datums(SIZES))
    assert torch.equal(reference_logprobs(made), reference_logprobs(made))
