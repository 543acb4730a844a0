from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.runs import fake_config, rows, rows_without_times, train_quietly
from e2e.tiny import (
    FAMILIES,
    config_for,
    datums_of,
    gradients,
    learner_for,
    policy_for,
    random_datums,
    random_prompts,
    write_model,
)
from inference_engine.plain import plain_distributions, plain_model
from scipy import stats
from transformers import AutoModelForCausalLM

from retrain.config import TrainConfig
from retrain.modeling.attention import Scoring
from retrain.modeling.packing import pack
from retrain.modeling.prefix import SharedPrefixAttention, TokenSpan
from retrain.types import Sampling

from .conftest import engine_on

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "all together": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
}
LENGTHS = (4, 11, 37, 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_fp32_logprobs_and_entropies_are_those_of_the_slow_version(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family, gain=1.5)
    config = config_for(model, model__dtype="fp32")
    policy = policy_for(config, device="cuda")
    plain = plain_model(model, policy, tmp_path / "adapter")
    sampling, prompts = Sampling(max_tokens=20, n=4, temperature=0.9, seed=3, **options), random_prompts(LENGTHS)
    for prompt, group in zip(prompts, engine_on(policy, config).generate(prompts, sampling), strict=True):
        for completion in group:
            tokens = completion.token_ids_T
            expected = plain_distributions(plain, prompt, tokens, sampling)
            chosen = np.log([distribution[token] for distribution, token in zip(expected, tokens, strict=True)])
            np.testing.assert_allclose(completion.logprobs_T, chosen, atol=1e-3)
            assert completion.entropies_T is not None
            np.testing.assert_allclose(completion.entropies_T, [stats.entropy(one) for one in expected], atol=2e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_drawn_as_often_as_they_should_be(tiny: Path, options: dict[str, Any], tmp_path: Path) -> None:
    config = config_for(tiny, model__dtype="fp32")
    policy = policy_for(config, device="cuda")
    plain, (prompt,) = plain_model(tiny, policy, tmp_path / "adapter"), random_prompts((5,))
    sampling = Sampling(max_tokens=1, n=20_000, temperature=1.3, seed=11, **options)
    drawn = np.array([c.token_ids_T[0] for c in engine_on(policy, config).generate([prompt], sampling)[0]])
    (expected,) = plain_distributions(plain, prompt, np.array([0]), sampling)
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    rare = expected * len(drawn) < 5
    merged = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected * len(drawn))]
    kept = merged[1] > 0
    assert stats.chisquare(merged[0][kept], merged[1][kept]).pvalue > 1e-3


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_greedy_tokens_are_those_of_the_cpu(family: str, temperature: float, tmp_path: Path) -> None:
    config = config_for(write_model(tmp_path / "model", family), model__dtype="fp32")
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=40, temperature=temperature)
    drawn = [engine_on(policy_for(config, device=d), config).generate(prompts, sampling) for d in ("cpu", "cuda")]
    for (here,), (there,) in zip(*drawn, strict=True):
        assert here.token_ids_T.tolist() == there.token_ids_T.tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_on_fresh_weights_the_mean_ratio_is_one(
    broad: Path, options: dict[str, Any], dtype: str, tolerance: float
) -> None:
    config = config_for(broad, model__dtype=dtype, training__temperature=1.0)
    policy = policy_for(config, trained=False, device="cuda")
    learner = learner_for(policy, config)
    learner.sampling = Sampling(max_tokens=64, n=8, temperature=1.0, seed=3, **options)
    prompts = random_prompts(LENGTHS)
    datums = datums_of(prompts, engine_on(policy, config).generate(prompts, learner.sampling))
    with torch.no_grad():
        packed = pack(datums, policy.device, with_history="repetition_penalty" in options)
        ratios = (learner.logprobs(packed) - packed.sampled_logprobs).exp()
    assert float(ratios.mean()) == pytest.approx(1.0, abs=tolerance)
    assert float((ratios - 1).abs().median()) < tolerance


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_in_bf16_the_engine_agrees_with_the_models_own_forward_pass(family: str, tmp_path: Path) -> None:
    # The family's usual small weights: sharpened ones would magnify bf16's rounding.
    model = write_model(tmp_path / "model", family, gain=1.0)
    config = config_for(model)
    policy = policy_for(config, trained=False, device="cuda")
    assert policy.dtype == torch.bfloat16, "the default on a GPU"
    prompts = random_prompts(LENGTHS)
    groups = engine_on(policy, config).generate(prompts, Sampling(max_tokens=20, n=2, temperature=1.0, seed=1))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager").cuda().eval()
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.as_tensor(np.concatenate([prompt, completion.token_ids_T]), device="cuda")[None]
            with torch.no_grad():
                logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
            targets = torch.as_tensor(completion.token_ids_T, device="cuda")[:, None]
            expected = logits.float().log_softmax(-1).gather(1, targets).squeeze(1).cpu().numpy()
            ratios = np.exp(completion.logprobs_T - expected)
            assert abs(ratios.mean() - 1) < 2e-2


def test_the_same_seed_draws_the_same_and_a_shrinking_batch_changes_nothing(
    broad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(broad, model__dtype="fp32")
    policy = policy_for(config, device="cuda")
    monkeypatch.setattr(policy, "stop_ids", tuple(range(8_000)))
    engine, prompts = engine_on(policy, config), random_prompts((5, 9, 3))
    sampling = Sampling(max_tokens=24, n=8, seed=5)
    runs = [engine.generate(prompts, sampling) for _ in range(2)]
    # Never move to a smaller graph.
    monkeypatch.setattr("retrain.inference_engine.pytorch.graphs.bucket", lambda rows, largest: largest)
    runs.append(engine.generate(prompts, sampling))
    tokens = [[c.token_ids_T.tolist() for group in run for c in group] for run in runs]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_step_on_the_gpu_moves_the_adapter_as_on_the_cpu(tiny: Path) -> None:
    config, datums = config_for(tiny, model__dtype="fp32"), random_datums([(3, 9), (11, 2), (1, 17), (6, 6)])
    found = {}
    for device in ("cpu", "cuda"):
        learner = learner_for(policy_for(config, device=device), config)
        totals = learner._backward([datums])
        found[device] = (totals.metrics()["loss"], {n: g.cpu() for n, g in gradients(learner.policy).items()})
    assert found["cpu"][0] == pytest.approx(found["cuda"][0], rel=1e-3)
    for name, gradient in found["cpu"][1].items():
        torch.testing.assert_close(found["cuda"][1][name], gradient, rtol=1e-2, atol=1e-4)


def test_a_training_step_in_bf16_lowers_the_loss(broad: Path) -> None:
    config = config_for(broad, training__lr=1e-3, training__temperature=1.0)
    policy = policy_for(config, trained=False, device="cuda")
    learner, prompts = learner_for(policy, config), random_prompts(LENGTHS)
    assert all(master.dtype == torch.float32 for master in learner.optimizer.masters)
    sampling = Sampling(max_tokens=32, n=4, temperature=1.0)
    datums = datums_of(prompts, engine_on(policy, config).generate(prompts, sampling))
    outcomes = [learner.step(datums) for _ in range(8)]
    assert all(outcome["skipped"] == 0 for outcome in outcomes)
    losses = [float(outcome["loss"] or 0.0) for outcome in outcomes]
    assert losses[-1] < losses[0]


def test_a_micro_batch_that_is_really_too_large_is_halved_until_it_fits(broad: Path) -> None:
    config = config_for(broad, memory__micro_batch_tokens=1 << 22, loss__ratio_cap=0.0)
    datums = random_datums(256 * [(64, 960)])
    cautious = config_for(broad, memory__micro_batch_tokens=8192, loss__ratio_cap=0.0)
    small = learner_for(policy_for(cautious, device="cuda"), cautious)
    expected = small.step(datums)
    del small
    torch.cuda.empty_cache()
    logged: list[str] = []
    learner = learner_for(policy_for(config, device="cuda"), config)
    learner.memory.log = logged.append
    # Room for a quarter of it.
    assert learner.memory.cost is not None
    room = learner.memory.cost.bytes(256 * 1024) // 4
    limit = (torch.cuda.memory_allocated() + room) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        outcome = learner.step(datums)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(line.startswith("Out of memory; continuing with micro-batches of ") for line in logged)
    assert 1024 <= learner.memory.micro_batch_tokens < 1 << 22
    assert outcome["skipped"] == 0
    assert outcome["loss"] == pytest.approx(expected["loss"], rel=2e-2, abs=1e-4)


def test_gradient_checkpointing_takes_less_memory(broad: Path) -> None:
    # One micro-batch, large enough for activations to outweigh the logits' slices.
    datums, peaks = random_datums(64 * [(64, 960)]), []
    for checkpointing in (False, True):
        config = config_for(broad, memory__gradient_checkpointing=checkpointing, memory__micro_batch_tokens=1 << 17)
        learner = learner_for(policy_for(config, device="cuda"), config)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        learner.step(datums)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("window", [None, 50], ids=["whole", "window"])
def test_flash_attention_over_shared_prompts_equals_padding(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    stretches = [TokenSpan(0, 70), TokenSpan(70, 33), TokenSpan(103, 200, 0, 70), TokenSpan(303, 1, 0, 70)]
    stretches += [TokenSpan(304, 129, 70, 33), TokenSpan(433, 300)]
    row, cuda = 733, torch.device("cuda", 0)
    query, key, value = (
        torch.randn(1, heads, row, 128, device=cuda, dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (8, 2, 2)
    )
    slopes = torch.randn(1, 8, row, 128, device=cuda, dtype=torch.bfloat16, generator=generator)
    found = []
    for flash in (True, False):
        monkeypatch.setattr("retrain.modeling.prefix.can_flash", lambda *_, flash=flash: flash)
        output = SharedPrefixAttention(stretches, cuda).attend(0, query, key, value, Scoring(0.1, window))
        found.append((output, *torch.autograd.grad((output * slopes).sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        error = (one.float() - other.float()).abs().max() / other.float().abs().max()
        assert float(error.detach()) < 2e-2


@pytest.mark.parametrize("size", [128, 64])
def test_long_sequences_by_cudnn_equal_flash_attention(size: int) -> None:
    generator, cuda = torch.Generator("cuda").manual_seed(0), torch.device("cuda", 0)
    spans = [TokenSpan(0, 70), TokenSpan(70, 4500), TokenSpan(4570, 300), TokenSpan(4870, 4199), TokenSpan(9069, 1)]
    query, key, value = (
        torch.randn(1, heads, 9070, size, device=cuda, dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (8, 2, 2)
    )
    slopes = torch.randn(1, 8, 9070, size, device=cuda, dtype=torch.bfloat16, generator=generator)
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            output = SharedPrefixAttention(spans, cuda).attend(0, query, key, value, Scoring(0.1))
            found.append((output, *torch.autograd.grad((output * slopes).sum(), (query, key, value))))
        finally:
            torch.use_deterministic_algorithms(False)
    for one, other in zip(*found, strict=True):
        error = (one.float() - other.float()).abs().max() / other.float().abs().max()
        assert float(error.detach()) < 2e-2


def test_in_bf16_shared_prompts_give_the_logprobs_and_gradients_of_repeated_ones(broad: Path) -> None:
    config = config_for(broad, loss__ratio_cap=0.0)
    learner = learner_for(policy_for(config, device="cuda"), config)
    datums = random_datums(6 * [(64, 90)])
    datums = [replace(datum, prompt_ids=datums[index % 2].prompt_ids) for index, datum in enumerate(datums)]
    with torch.no_grad():
        shared = learner.logprobs(pack(datums, learner.policy.device, False))
        repeated = learner.logprobs(pack(datums, learner.policy.device, False, share=False))
    assert float((shared - repeated).abs().mean()) < 2e-2
    together, alone = {}, {}
    for found, batches in ((together, [datums]), (alone, [[datum] for datum in datums])):
        learner._backward(batches)
        found.update(
            {n: m.grad.clone() for n, m in zip(learner.optimizer.names, learner.optimizer.masters, strict=True)}
        )
    total = torch.cat([(together[name] - alone[name]).flatten() for name in together]).norm()
    assert float(total) < 0.05 * float(torch.cat([gradient.flatten() for gradient in alone.values()]).norm())


def test_a_plan_is_made_and_its_prediction_is_close(broad: Path) -> None:
    config = config_for(broad)
    learner = learner_for(policy_for(config, device="cuda"), config)
    learner.memory.log = (logged := list[str]()).append
    # The plan learns from a peak that training sets; tests before this one went higher.
    torch.cuda.reset_peak_memory_stats()
    learner.step(random_datums(64 * [(64, 960)]))
    assert logged[0].startswith("Memory plan: micro-batches of 9216 tokens, none of ")
    assert learner.memory.measured
    assert learner.memory.cost is not None
    # The plan counts on compiled layers; others keep more, up to the most that it believes.
    assert 0.3 < learner.memory.cost.correction < (4.1 if "TORCHDYNAMO_DISABLE" in os.environ else 2.0)


def gpu_run(tiny: Path, folder: Path, **overrides: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "backend__backend": "local",
        "backend__devices": "gpu:0",
        "model__lora_rank": 4,
        "training__max_tokens": 16,
        "training__lr": 1e-2,
        "reward__custom_function": "score_length",
    }
    return fake_config(tiny, folder, **settings | overrides)


def test_a_complete_run_trains_on_the_gpu_and_can_be_resumed(tiny: Path, tmp_path: Path) -> None:
    _, printed = train_quietly(gpu_run(tiny, tmp_path, training__max_steps=2))
    assert "on cuda:0..." in printed
    train_quietly(gpu_run(tiny, tmp_path, resume__from=str(tmp_path / "logs")))
    metrics = rows(tmp_path / "logs")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert any(row["num_datums"] for row in metrics)
    assert all(row["ratio_mean"] is None or abs(row["ratio_mean"] - 1) < 0.1 for row in metrics)
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert state["status"] == "finished"


def test_one_gpu_may_sample_while_the_cpu_trains(tiny: Path, tmp_path: Path) -> None:
    both = {"backend__devices": "gpu:0,cpu", "model__dtype": "fp32"}
    train_quietly(gpu_run(tiny, tmp_path, **both))
    assert not any(row["loss_is_placeholder"] for row in rows_without_times(tmp_path / "logs"))


def test_full_finetuning_learns_in_bf16_and_the_sampler_follows(broad: Path) -> None:
    config = config_for(broad, model__lora_rank=0, training__lr=2e-4, training__temperature=1.0, kl__beta=0.01)
    policy = policy_for(config, device="cuda")
    learner, engine = learner_for(policy, config), engine_on(policy, config)
    prompts = random_prompts((9, 40, 3, 17))
    first = None
    for step in range(4):
        engine.sync(policy)
        datums = datums_of(prompts, engine.generate(prompts, learner.sampling), seed=0)
        metrics = learner.step(datums, step)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=2e-2)
        first = metrics["kl_ref"] if first is None else first
    assert first == pytest.approx(0.0, abs=1e-4)
    assert isinstance(metrics["kl_ref"], float) and metrics["kl_ref"] > 0


def test_gradients_of_full_finetuning_on_the_gpu_are_those_of_the_cpu(tiny: Path) -> None:
    config = config_for(tiny, model__dtype="fp32", model__lora_rank=0, loss__ratio_cap=0.0, kl__beta=0.1)
    found = []
    for device in ("cpu", "cuda"):
        made = learner_for(policy_for(config, device=device), config)
        made._backward(made.split(random_datums(6 * [(20, 30)])))
        found.append({n: p.grad.cpu() for n, p in made.policy.adapted.named_parameters() if p.grad is not None})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def test_an_offloaded_reference_gives_the_same_penalty(broad: Path) -> None:
    metrics = []
    for offload in (False, True):
        options = {"model__lora_rank": 0, "kl__beta": 0.1, "memory__offload_untrained_models": offload}
        config = config_for(broad, **options)
        learner = learner_for(policy_for(config, device="cuda"), config)
        learner.step(random_datums(8 * [(20, 30)]), 0)
        assert learner.reference is not None
        assert {tensor.device.type for tensor in learner.reference.tensors} == {"cpu" if offload else "cuda"}
        metrics.append(learner.step(random_datums(8 * [(20, 30)]), 1)["kl_ref"])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-2)
