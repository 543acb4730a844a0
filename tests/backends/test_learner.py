from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.tiny import (
    PlainTokenizer,
    config_for,
    gradients,
    learner_for,
    policy_for,
    random_datums,
    random_prompts,
    write_model,
)
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain.backends.local.learner import MAX_SKIPPED, Learner
from retrain.errors import BackendError, ConfigError
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling import logprobs as logprobs_module
from retrain.modeling.attention import PackedAttention
from retrain.modeling.packing import BatchLoad, length_of, pack, split_by_tokens
from retrain.types import Datum, Sampling

SIZES = ((3, 9), (11, 2), (1, 17), (6, 6), (3, 1), (8, 13))
CPU = torch.device("cpu")


def learner(model: Path, **overrides: Any) -> Learner:
    config = config_for(model, **overrides)
    return learner_for(policy_for(config), config)


def backward(made: Learner, datums: list[Datum]) -> tuple[dict[str, Tensor], float]:
    """Gradients of one step that is not taken, and its loss."""
    totals = made._backward(split_by_tokens(datums, made.memory.micro_batch_tokens))
    return dict(gradients(made.policy)), float(totals.metrics()["loss"] or 0.0)


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **{"rtol": 1e-4, "atol": 1e-6} | tolerance)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral", "gpt2"])
def test_packed_logprobs_are_those_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    made = learner(write_model(tmp_path / "model", family))
    datums = random_datums(SIZES)
    with torch.no_grad():
        together = made.logprobs(pack(datums, CPU, with_history=False))
        alone = torch.cat([made.logprobs(pack([datum], CPU, with_history=False)) for datum in datums])
        # And those of the model's own forward pass, with its own attention.
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
        made.policy.save_adapter(tmp_path / "adapter")
        plain = load_adapter(plain, tmp_path / "adapter")
        expected = torch.cat([plain_logprobs(plain, datum, made.sampling.temperature) for datum in datums])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)
    torch.testing.assert_close(together, expected, rtol=0, atol=5e-5)


def test_the_modules_of_an_adapter_are_sorted_so_that_equal_runs_write_equal_files(tmp_path: Path) -> None:
    learner(write_model(tmp_path / "model")).policy.save_adapter(tmp_path / "adapter")
    modules = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 5 and modules == sorted(modules)


def plain_logprobs(model: torch.nn.Module, datum: Datum, temperature: float) -> Tensor:
    ids = torch.as_tensor(np.concatenate([datum.prompt_ids, datum.completion_ids_T]))[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(datum.prompt_ids) - 1 : -1]
    targets = torch.as_tensor(datum.completion_ids_T)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, targets).squeeze(1)


def load_adapter(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    with warnings.catch_warnings():
        # GPT-2's transposed matrices, see load_policy.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        return PeftModel.from_pretrained(model, str(folder)).eval()


@pytest.mark.parametrize("kind", ["importance_sampling", "gspo", "dr_grpo", "grpo"])
def test_the_size_of_micro_batches_does_not_change_the_gradient(tiny: Path, kind: str) -> None:
    datums = random_datums(SIZES)
    made = learner(tiny, loss__type=kind)
    whole, loss = backward(made, datums)
    for tokens in (1, 20, 50):
        made.memory.micro_batch_tokens = tokens
        parts, parts_loss = backward(made, datums)
        same(parts, whole)
        assert parts_loss == pytest.approx(loss, rel=1e-5)


def test_micro_batches_hold_every_datum_once_and_no_more_tokens_than_asked() -> None:
    datums = random_datums(SIZES)
    for most in (1, 19, 25, 1000):
        batches = split_by_tokens(datums, most)
        assert sorted(id(datum) for batch in batches for datum in batch) == sorted(map(id, datums))
        assert all(len(batch) == 1 or max(map(length_of, batch)) * len(batch) <= most for batch in batches)


def test_long_completions_of_one_prompt_are_spread_over_full_batches() -> None:
    """Their prompt is too short to be worth sharing; kept together, the groups would leave half of a batch empty."""
    lengths = [(5, length) for length in (900, 700, 400, 300, 800, 600, 500, 200)]
    datums = [replace(datum, prompt_ids=np.arange(5) + (at % 2)) for at, datum in enumerate(random_datums(lengths))]
    batches = split_by_tokens(datums, 1200, BatchLoad.fed)
    tokens = [sum(map(length_of, batch)) for batch in batches]
    assert len(batches) == 4
    assert max(tokens) - min(tokens) < 20


def test_masked_tokens_take_no_part_in_loss_or_gradient(tiny: Path) -> None:
    made = learner(tiny)
    datums = random_datums(SIZES[:2])
    hidden = [replace(d, mask_T=np.arange(len(d.mask_T)) % 2 == 0) for d in datums]
    noisy = [replace(d, advantages_T=np.where(d.mask_T, d.advantages_T, 1e3)) for d in hidden]
    calm, loss = backward(made, hidden)
    loud, loud_loss = backward(made, noisy)
    same(loud, calm)
    assert loud_loss == pytest.approx(loss)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "repetition_penalty": 1.3}], ids=["plain", "shaped"])
def test_logprobs_by_slices_equal_those_of_the_whole_vocabulary_at_once(
    tiny: Path, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    datums = random_datums(SIZES)
    made = learner(tiny, **{f"training__{key}": value for key, value in options.items()})
    whole, _ = backward(made, datums)
    packed = pack(datums, CPU, with_history=bool(options))
    expected = made.logprobs(packed).detach()
    # Seven rows of logits at a time.
    monkeypatch.setitem(logprobs_module.SLICE_BYTES, "cpu", 7 * 4 * made.policy.vocabulary)
    largest: list[int] = []
    head = made.policy.head
    monkeypatch.setattr(made.policy, "head", lambda states: (largest.append(len(states)), head(states))[1])
    sliced, _ = backward(made, datums)
    same(sliced, whole)
    # And when they are computed again in the backward pass.
    monkeypatch.setitem(logprobs_module.KEPT_BYTES, "cpu", 0)
    recomputed, _ = backward(made, datums)
    same(recomputed, whole)
    torch.testing.assert_close(made.logprobs(packed).detach(), expected, rtol=0, atol=1e-5)
    assert max(largest) == 7


@pytest.mark.parametrize("rows", [4, 1000])
def test_fused_logprobs_equal_plain_ones_with_their_gradient(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator)
    hidden = torch.randn(11, 16, generator=generator).requires_grad_()
    targets, slopes = torch.arange(11) * 4, torch.randn(11, generator=generator)
    expected = (hidden @ weight.T / 0.7).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    (expected_gradient,) = torch.autograd.grad(expected @ slopes, hidden)
    fused: Tensor = logprobs_module.TemperedLogprobs.apply(hidden, weight, targets, 0.7, rows)
    (gradient,) = torch.autograd.grad(fused @ slopes, hidden)
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_the_gradient_is_that_of_the_formula_written_out(tiny: Path) -> None:
    made = learner(tiny, loss__ratio_cap=0.0)
    datums = random_datums(SIZES)
    packed, loss = backward(made, datums)
    made.optimizer.clear()
    # Straight from the definition, a sequence at a time, with the model's own forward pass and its logits whole.
    model, terms, tokens = made.policy.adapted, [], 0
    for datum in datums:
        ids = torch.as_tensor(np.concatenate([datum.prompt_ids, datum.completion_ids_T]))[None]
        attend = PackedAttention([ids.shape[1]], CPU)
        logits = model(input_ids=ids, attend=attend, use_cache=False).logits[0, len(datum.prompt_ids) - 1 : -1]
        targets = torch.as_tensor(datum.completion_ids_T)[:, None]
        logprobs = (logits / 0.9).log_softmax(-1).gather(1, targets).squeeze(1)
        ratio = (logprobs - torch.as_tensor(datum.logprobs_T)).exp()
        terms.append((ratio * torch.as_tensor(datum.advantages_T, dtype=torch.float32)).sum())
        tokens += len(targets)
    total = -torch.stack(terms).sum() / tokens
    total.backward()
    assert float(total.detach()) == pytest.approx(loss, rel=1e-5)
    same(packed, dict(gradients(made.policy)))


def test_a_step_moves_the_adapter_and_nothing_else(tiny: Path) -> None:
    made = learner(tiny)
    before = {name: tensor.clone() for name, tensor in made.policy.adapted.state_dict().items()}
    metrics = made.step(random_datums(SIZES))
    changed = {n for n, t in made.policy.adapted.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {name for name in before if "lora_" in name}
    assert metrics["skipped"] == 0
    assert float(metrics["grad_norm"] or 0) > 0


def test_metrics_of_a_step_on_fresh_samples_say_that_the_ratio_is_one(tiny: Path) -> None:
    config = config_for(tiny)
    policy = policy_for(config)
    engine = PyTorchEngine(policy, config.inference, PlainTokenizer(), lambda *_: None)
    prompts = random_prompts((5, 9))
    groups = engine.generate(prompts, Sampling(max_tokens=12, n=3, temperature=0.9, seed=1))
    datums = [
        Datum(p, c.token_ids_T, c.logprobs_T, np.full(len(c.token_ids_T), 0.5), np.ones(len(c.token_ids_T), bool))
        for p, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    metrics = learner_for(policy, config).step(datums)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl_sample_train"] == pytest.approx(0.0, abs=1e-8)
    assert metrics["loss"] == pytest.approx(-0.5, abs=1e-5)


def test_no_datums_leave_the_weights_alone(tiny: Path) -> None:
    made = learner(tiny)
    before = {name: tensor.clone() for name, tensor in made.policy.adapter_state().items()}
    for datums in ([], [replace(random_datums([(3, 4)])[0], mask_T=np.zeros(4, bool))]):
        assert made.step(datums)["loss"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.policy.adapter_state().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(tiny: Path, bad: float) -> None:
    made = learner(tiny)
    good = random_datums(SIZES)
    made.step(good)
    before = {name: tensor.clone() for name, tensor in made.policy.adapter_state().items()}
    moments = {n: s["exp_avg"].clone() for n, s in zip(before, made.optimizer.adam.state.values(), strict=True)}
    poisoned = [replace(good[0], advantages_T=np.full(len(good[0].advantages_T), bad)), *good[1:]]
    metrics = made.step(poisoned)
    assert metrics["skipped"] == 1
    assert metrics["grad_norm"] is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.policy.adapter_state().items())
    assert all(
        torch.equal(s["exp_avg"], moments[n]) for n, s in zip(before, made.optimizer.adam.state.values(), strict=True)
    )
    assert made.step(good)["skipped"] == 0


def test_a_run_that_no_longer_learns_because_of_its_gradients_ends(tiny: Path) -> None:
    logged: list[str] = []
    made = learner(tiny)
    made.log = logged.append
    good = random_datums(SIZES)
    bad = [replace(good[0], advantages_T=np.full(len(good[0].advantages_T), math.nan)), *good[1:]]
    for step in range(MAX_SKIPPED - 1):
        assert made.step(bad, step)["skipped"] == 1
    made.step(good, MAX_SKIPPED - 1)
    for step in range(10, 9 + MAX_SKIPPED):
        made.step(bad, step)
    with pytest.raises(BackendError, match="not finite in 5 steps in a row, the last of them step 14"):
        made.step(bad, 9 + MAX_SKIPPED)
    assert logged == [
        f"Warning: step {step}: the gradient is not finite, so the weights were not updated." for step in (0, 10)
    ]


def test_a_resumed_run_ends_where_an_uninterrupted_one_would(tiny: Path, tmp_path: Path) -> None:
    made, resumed = learner(tiny), learner(tiny)
    good = random_datums(SIZES)
    bad = [replace(good[0], advantages_T=np.full(len(good[0].advantages_T), math.nan)), *good[1:]]
    for step in range(MAX_SKIPPED - 1):
        made.step(bad, step)
    made.save(tmp_path)
    resumed.load(tmp_path)
    with pytest.raises(BackendError, match="the last of them step 4"):
        resumed.step(bad, MAX_SKIPPED - 1)


@pytest.mark.parametrize("rank", [4, 0])
def test_saved_weights_can_be_read_by_whom_the_umask_allows(tiny: Path, tmp_path: Path, rank: int) -> None:
    learner(tiny, model__lora_rank=rank).policy.save_adapter(tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    weights = [mode for name, mode in modes.items() if name.endswith(".safetensors")]
    (tmp_path / "plain").write_text("")
    assert weights == [(tmp_path / "plain").stat().st_mode & 0o777]


def test_a_gradient_is_clipped_to_its_norm(tiny: Path) -> None:
    datums, norms = random_datums(SIZES), {}
    for clip in (0.0, 1e-3):
        made = learner(tiny, loss__grad_clip=clip)
        seen: list[float] = []
        step = made.optimizer.adam.step

        def watch(seen: list[float] = seen, made: Learner = made, step: Any = step) -> None:
            seen.append(float(torch.stack([g.norm() for g in gradients(made.policy).values()]).norm()))
            step()

        made.optimizer.adam.step = watch  # type: ignore[method-assign, assignment]
        reported = made.step(datums)["grad_norm"]
        norms[clip] = (reported, seen[0])
    assert norms[0.0][0] == pytest.approx(norms[0.0][1], rel=1e-4)
    assert norms[0.0][0] == pytest.approx(norms[1e-3][0], rel=1e-6)
    assert norms[1e-3][1] == pytest.approx(1e-3, rel=1e-2)


def fail_above(made: Learner, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a forward pass of more than `most` tokens run out of memory."""
    tried: list[int] = []
    hidden = made.policy.hidden

    def limited(ids: Tensor, *rest: Any) -> Tensor:
        tried.append(ids.shape[1])
        if ids.shape[1] > most:
            raise torch.OutOfMemoryError("pretended")
        return hidden(ids, *rest)

    monkeypatch.setattr(made.policy, "hidden", limited)
    return tried


def test_out_of_memory_halves_the_micro_batch_and_continues(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datums, logged = random_datums(SIZES), []
    undisturbed = learner(tiny)
    undisturbed.step(datums)
    made = learner(tiny, memory__micro_batch_tokens=160)
    made.memory.log = logged.append
    tried = fail_above(made, 35, monkeypatch)
    metrics = made.step(datums)
    assert metrics["skipped"] == 0
    assert logged == [f"Out of memory; continuing with micro-batches of {n} tokens." for n in (80, 40)]
    for name, tensor in made.policy.adapter_state().items():
        torch.testing.assert_close(tensor, undisturbed.policy.adapter_state()[name], rtol=1e-3, atol=2e-5)
    # What was learnt about the memory is remembered.
    tried.clear()
    made.step(datums)
    assert max(tried) <= 35


def test_a_sequence_that_fits_no_memory_is_an_error_that_says_what_to_try(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(tiny)
    made.memory.log = (logged := list[str]()).append
    fail_above(made, 5, monkeypatch)
    with pytest.raises(BackendError, match=r"one sequence of 21 tokens does not fit.*all layers recomputed"):
        made.step(random_datums(SIZES))
    assert logged[-2:] == [
        "Out of memory; continuing with micro-batches of 21 tokens.",
        "Out of memory; continuing with activations recomputed in every layer.",
    ]


def test_dropout_is_the_same_for_the_same_seed_and_touches_the_adapter_alone(tmp_path: Path) -> None:
    # This GPT-2 has dropout of its own in embeddings, attention and residuals, which must stay off.
    made = learner(write_model(tmp_path / "model", "gpt2"), lora__dropout=0.5)
    datums = random_datums(SIZES)

    def with_seed(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return backward(made, datums)[0]

    first = with_seed(1)
    same(with_seed(1), first, rtol=0.0, atol=0.0)
    other = with_seed(2)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    for module in made.policy.adapted.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"].p = 0.0
    same(with_seed(1), with_seed(2), rtol=0.0, atol=0.0)


def test_dropout_is_off_while_sampling_and_scoring(tiny: Path) -> None:
    made = learner(tiny, lora__dropout=0.5)
    made.step(random_datums(SIZES))
    packed = pack(random_datums(SIZES), CPU, with_history=False)
    with torch.no_grad():
        assert torch.equal(made.logprobs(packed), made.logprobs(packed))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradient(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    datums, calls = random_datums(SIZES), []
    expected, _ = backward(learner(model), datums)
    made = learner(model, memory__gradient_checkpointing=True)
    layer = next(m for m in made.policy.causal_lm.modules() if type(m).__name__ in ("Qwen3DecoderLayer", "GPT2Block"))
    forward = layer.forward
    layer.forward = lambda *a, **k: (calls.append(1), forward(*a, **k))[1]
    checkpointed, _ = backward(made, datums)
    same(checkpointed, expected)
    batches = split_by_tokens(datums, made.memory.micro_batch_tokens)
    assert len(calls) == 2 * len(batches), "the layer must run forward a second time during backward"


def test_sampling_works_beside_gradient_checkpointing(tiny: Path) -> None:
    config = config_for(tiny, memory__gradient_checkpointing=True)
    made = learner_for(policy_for(config), config)
    engine = PyTorchEngine(made.policy, config.inference, PlainTokenizer(), lambda *_: None)
    plain = PyTorchEngine(policy_for(config), config.inference, PlainTokenizer(), lambda *_: None)
    prompts, sampling = random_prompts((5, 3)), Sampling(max_tokens=6, n=2)
    pairs = zip(engine.generate(prompts, sampling), plain.generate(prompts, sampling), strict=True)
    assert all((a.token_ids_T == b.token_ids_T).all() for g, h in pairs for a, b in zip(g, h, strict=True))
    assert made.step(random_datums(SIZES))["skipped"] == 0


def test_save_and_load_restore_adapter_and_optimizer_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    datums = random_datums(SIZES)
    made = learner(tiny)
    made.step(datums)
    made.step(datums[:3])
    made.save(tmp_path)
    other = learner(tiny)
    other.step(datums[4:])
    other.load(tmp_path)
    outcomes = [(one.step(datums), one.step(datums[2:])) for one in (made, other)]
    assert outcomes[0] == outcomes[1]
    for (name, tensor), restored in zip(
        made.policy.adapter_state().items(), other.policy.adapter_state().values(), strict=True
    ):
        assert torch.equal(tensor, restored), name
    for mine, theirs in zip(made.optimizer.adam.state.values(), other.optimizer.adam.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions takes a slower path
def test_steps_too_small_for_bf16_add_up_and_survive_a_resume(tiny: Path, tmp_path: Path) -> None:
    options = {"model__dtype": "bf16", "training__lr": 1e-6}
    made, datums = learner(tiny, **options), random_datums(SIZES[:2])
    start = {name: tensor.clone() for name, tensor in made.policy.adapter_state().items()}
    made.step(datums)
    assert {tensor.dtype for tensor in made.policy.adapter_state().values()} == {torch.bfloat16}
    masters = dict(zip(made.optimizer.names, made.optimizer.masters, strict=True))
    for name, tensor in made.policy.adapter_state().items():
        assert not torch.equal(masters[name], start[name].float()), name
        assert torch.equal(tensor, masters[name].to(torch.bfloat16)), "the adapter is its masters' rounding"
    made.save(tmp_path)
    other = learner(tiny, **options)
    other.load(tmp_path)
    assert made.step(datums) == other.step(datums)
    assert all(torch.equal(a, b) for a, b in zip(made.optimizer.masters, other.optimizer.masters, strict=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_in_bf16_gradients_of_micro_batches_are_summed_in_float32(tiny: Path) -> None:
    made, datums = learner(tiny, model__dtype="bf16"), random_datums(SIZES)
    made._backward(split_by_tokens(datums, 1))
    assert all(parameter.grad is None for parameter in made.optimizer.parameters)
    assert {master.grad.dtype for master in made.optimizer.masters if master.grad is not None} == {torch.float32}


def test_a_checkpoint_from_before_the_first_update_loads(tiny: Path, tmp_path: Path) -> None:
    made, other = learner(tiny), learner(tiny)
    made.save(tmp_path)
    other.step(random_datums(SIZES))
    other.load(tmp_path)
    assert made.step(random_datums(SIZES)) == other.step(random_datums(SIZES))


def test_an_adapter_of_another_shape_is_rejected(tiny: Path, tmp_path: Path) -> None:
    learner(tiny, lora__target_modules="q_proj,v_proj").save(tmp_path)
    with pytest.raises(BackendError, match="do not match"):
        learner(tiny).load(tmp_path)


def test_the_adapter_loads_with_peft_and_gives_the_same_logits(tiny: Path, tmp_path: Path) -> None:
    made = learner(tiny)
    made.step(random_datums(SIZES))
    made.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    datum = random_datums([(9, 8)])[0]
    with torch.no_grad():
        expected = plain_logprobs(loaded, datum, made.sampling.temperature)
        actual = made.logprobs(pack([datum], CPU, with_history=False))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_rank_alpha_and_target_modules_are_as_configured(tiny: Path) -> None:
    policy = policy_for(config_for(tiny, model__lora_rank=3, lora__alpha=7, lora__target_modules="q_proj, v_proj"))
    adapted = {n.split(".")[-1]: m for n, m in policy.adapted.named_modules() if isinstance(m, LoraLayer)}
    assert set(adapted) == {"q_proj", "v_proj"}
    assert {(layer.r["default"], layer.lora_alpha["default"]) for layer in adapted.values()} == {(3, 7)}
    double = policy_for(config_for(tiny, model__lora_rank=3)).adapted.peft_config["default"]
    assert double.lora_alpha == 6


@pytest.mark.parametrize("given", ["v_porj", "q_proj,v_porj", "q_proj,xself_attn.k_proj,v_porj"])
def test_target_modules_that_do_not_exist_are_rejected(tiny: Path, given: str) -> None:
    unknown = ", ".join(repr(name) for name in given.split(",") if name != "q_proj")
    with pytest.raises(ConfigError, match=rf"\[lora\] target_modules: .* has no module {unknown}\.  Try: .*v_proj"):
        policy_for(config_for(tiny, lora__target_modules=given))


def test_target_modules_that_cannot_have_an_adapter_are_rejected(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[lora\] target_modules = 'mlp' does not fit"):
        policy_for(config_for(tiny, lora__target_modules="mlp"))


def test_a_target_module_may_be_one_of_one_layer(tiny: Path) -> None:
    policy = policy_for(config_for(tiny, lora__target_modules="0.self_attn.q_proj,"))
    assert len(policy.adapter_state()) == 2


def test_the_adapter_begins_the_same_for_the_same_seed(tiny: Path) -> None:
    states = [policy_for(config_for(tiny, training__seed=seed), trained=False).adapter_state() for seed in (5, 5, 6)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_the_optimizer_is_adamw_as_configured(tiny: Path) -> None:
    made = learner(
        tiny,
        training__lr=3e-4,
        training__weight_decay=0.1,
        optimizer__beta1=0.5,
        optimizer__beta2=0.7,
        optimizer__eps=1e-6,
    )
    (group,) = made.optimizer.adam.param_groups
    assert isinstance(made.optimizer.adam, torch.optim.AdamW)
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (3e-4, 0.1, (0.5, 0.7), 1e-6)
