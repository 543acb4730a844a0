from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import slow
from e2e.tiny import CONTEXT, EOS, PlainTokenizer, config_for, datums_of, learner_for, policy_for, random_prompts
from peft.tuners.lora import LoraLayer
from scipy import stats

from retrain.config.schema import Inference
from retrain.errors import RolloutError, SamplingMemoryError
from retrain.inference_engine.pytorch import PyTorchEngine, cache
from retrain.modeling.packing import pack
from retrain.types import Completion, IntArray, Sampling

from .conftest import Rig, build_rig
from .plain import plain_distribution, plain_distributions

LENGTHS = (4, 11, 7, 1)
OPTIONS: dict[str, dict[str, float]] = {
    "nothing": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "all together": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
}


def sampling_with(**options: float) -> Sampling:
    return replace(Sampling(max_tokens=20, n=4, temperature=0.9, seed=3), **options)  # type: ignore[arg-type]


def tokens_of(groups: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [completion.token_ids_T.tolist() for group in groups for completion in group]


@pytest.mark.parametrize(
    "options", [OPTIONS["all together"], *slow(OPTIONS["nothing"])], ids=["all together", "nothing"]
)
def test_every_family_draws_what_the_slow_version_draws(rig: Rig, options: dict[str, float]) -> None:
    compare_with_slow_version(rig, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_draws_what_the_slow_version_draws(llama: Rig, options: dict[str, float]) -> None:
    compare_with_slow_version(llama, options)


def compare_with_slow_version(rig: Rig, options: dict[str, float]) -> None:
    """Tokens, log-probs and entropies."""
    sampling, prompts = sampling_with(**options), random_prompts(LENGTHS)
    groups = rig.engine.generate(prompts, sampling)
    for row, (prompt, completion) in enumerate((p, c) for p, group in zip(prompts, groups, strict=True) for c in group):
        tokens = completion.token_ids_T
        # A row has numbers of its own, one a token; the draw inverts the cumulative distribution at them.
        uniforms = np.random.default_rng((sampling.seed, row)).random(sampling.max_tokens)
        for at, expected in enumerate(plain_distributions(rig.plain, prompt, tokens, sampling)):
            place = f"row {row}, token {at}"
            drawn = uniforms[at]
            cumulative = np.cumsum(expected)
            assert cumulative[tokens[at]] - expected[tokens[at]] - 1e-4 <= drawn <= cumulative[tokens[at]] + 1e-4, place
            assert abs(completion.logprobs_T[at] - np.log(expected[tokens[at]])) < 1e-4, place
            support = expected[expected > 0]
            assert completion.entropies_T is not None
            assert abs(completion.entropies_T[at] + (support * np.log(support)).sum()) < 1e-3, place


@pytest.mark.parametrize("options", [OPTIONS["all together"], *slow(*OPTIONS.values())])
def test_on_fresh_weights_the_importance_ratio_is_one(rig: Rig, options: dict[str, float]) -> None:
    sampling, prompts = sampling_with(**options), random_prompts(LENGTHS)
    learner = learner_for(rig.policy, rig.config)
    learner.sampling = sampling
    datums = datums_of(prompts, rig.engine.generate(prompts, sampling))
    with torch.no_grad():
        packed = pack(datums, rig.policy.device, with_history=sampling.repetition_penalty != 1.0)
        ratios = (learner.logprobs(packed) - packed.sampled_logprobs).exp()
    assert (ratios - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0, "top_p": 0.5}, *slow({"temperature": 1e-4}, {"temperature": 0.0})]
)
def test_greedy_tokens_are_those_of_generate(rig: Rig, options: dict[str, float]) -> None:
    prompts = random_prompts(LENGTHS)
    groups = rig.engine.generate(prompts, Sampling(max_tokens=14, seed=1, **options))
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        if not options["temperature"]:
            assert completion.logprobs_T.tolist() == [0.0] * len(completion.token_ids_T), "no other could be drawn"
        ids = torch.as_tensor(prompt)[None]
        generated = rig.plain.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14, pad_token_id=0
        )
        assert completion.token_ids_T.tolist() == generated[0, len(prompt) :].tolist()


def test_a_prompt_may_be_prefilled_once_or_for_each_completion(rig: Rig) -> None:
    prompts, sampling = random_prompts(LENGTHS), sampling_with()
    apart = PyTorchEngine(rig.policy, Inference(prefix_caching=False), PlainTokenizer(), lambda *_: None)
    assert tokens_of(apart.generate(prompts, sampling)) == tokens_of(rig.engine.generate(prompts, sampling))


def test_a_completion_does_not_depend_on_who_else_is_in_the_batch(llama: Rig) -> None:
    prompts, sampling = random_prompts(LENGTHS), sampling_with()
    together = llama.engine.generate(prompts, sampling)
    # Rows draw their numbers by place, so the first prompt's are drawn alike only with the rest in place; change those.
    others = [prompts[0], *random_prompts(LENGTHS[1:], seed=9)]
    assert tokens_of(llama.engine.generate(others, sampling))[:4] == tokens_of(together)[:4]


def early_stopping(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """Let an eighth of the vocabulary stop a completion, so that rows finish at every step."""
    monkeypatch.setattr(llama.policy, "stop_ids", (EOS, *range(3, 20)))
    return Sampling(max_tokens=16, n=16, temperature=1.5, seed=5)


def test_finished_rows_leave_the_batch_without_changing_what_the_others_draw(
    llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, prompts, widths = early_stopping(llama, monkeypatch), random_prompts((5, 9, 3)), []
    model = llama.engine.model
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: (widths.append(len(ids)), hidden(ids, *rest))[1])
    shrinking = llama.engine.generate(prompts, sampling)
    narrowest = min(widths[1:])
    monkeypatch.setattr("retrain.inference_engine.pytorch.eager.SHRINK_BELOW", -1.0)
    widths.clear()
    assert tokens_of(llama.engine.generate(prompts, sampling)) == tokens_of(shrinking)
    assert set(widths[1:]) == {48}
    assert narrowest < 16


def test_completions_that_the_memory_of_a_cpu_does_not_hold_take_turns(
    llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling, widths = random_prompts((5, 9, 3)), Sampling(max_tokens=16, n=4, temperature=1.5, seed=5), []
    engine = PyTorchEngine(llama.policy, Inference(), PlainTokenizer(), lambda *_: None)
    together = engine.generate(prompts, sampling)
    # Nothing that depends on the machine is recorded where it does not matter.
    assert engine.sizes()["room"] == 0
    hidden = engine.model.hidden
    monkeypatch.setattr(engine.model, "hidden", lambda ids, *rest: (widths.append(len(ids)), hidden(ids, *rest))[1])
    # 384 bytes for each of 128 tokens, of which at most 25 are used: five rows fit into three quarters.
    monkeypatch.setattr(cache, "cache_memory", lambda: 330_000)
    short = PyTorchEngine(llama.policy, Inference(), PlainTokenizer(), lambda *_: None)
    assert tokens_of(short.generate(prompts, sampling)) == tokens_of(together)
    assert short.sizes()["room"] == 330_000
    monkeypatch.setattr(cache, "cache_memory", lambda: 1 << 40)
    assert engine.restore_sizes(short.sizes())
    engine.generate(prompts, sampling)
    assert max(widths[1:]) == 5
    monkeypatch.setattr(cache, "cache_memory", lambda: 60_000)
    with pytest.raises(SamplingMemoryError, match="the KV cache of one completion does not fit"):
        short.generate(prompts, sampling)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = early_stopping(llama, monkeypatch)
    stops, reasons = set(llama.policy.stop_ids), set()
    for group in llama.engine.generate(random_prompts((5, 9, 3)), sampling):
        for completion in group:
            ids = completion.token_ids_T
            reasons.add(completion.finish_reason)
            assert not stops & set(ids[:-1].tolist())
            assert completion.finish_reason == ("stop" if ids[-1] in stops else "length")
            assert completion.finish_reason == "stop" or len(ids) == 16
            assert len(completion.logprobs_T) == len(ids)
    assert reasons == {"stop", "length"}


def test_one_token_may_be_asked_for(llama: Rig) -> None:
    ((completion,),) = llama.engine.generate(random_prompts((6,)), Sampling(max_tokens=1))
    assert len(completion.token_ids_T) == 1


def test_the_cache_grows_past_its_first_block(llama: Rig) -> None:
    sampling, (prompt,) = Sampling(max_tokens=150, n=2, seed=2), random_prompts((20,))
    for completion in llama.engine.generate([prompt], sampling)[0]:
        expected = plain_distributions(llama.plain, prompt, completion.token_ids_T, sampling)
        chosen = [distribution[token] for distribution, token in zip(expected, completion.token_ids_T, strict=True)]
        np.testing.assert_allclose(completion.logprobs_T, np.log(chosen), atol=1e-4)


def test_the_same_seed_draws_the_same_and_another_seed_does_not(llama: Rig) -> None:
    prompts, sampling = random_prompts(LENGTHS), sampling_with()
    first = tokens_of(llama.engine.generate(prompts, sampling))
    torch.manual_seed(99)
    assert tokens_of(llama.engine.generate(prompts, sampling)) == first
    assert tokens_of(llama.engine.generate(prompts, replace(sampling, seed=4))) != first


QUICK = ("nothing", "all together")


@pytest.mark.parametrize(
    "options",
    [*(OPTIONS[name] for name in QUICK), *slow(*(OPTIONS[name] for name in OPTIONS if name not in QUICK))],
    ids=[*QUICK, *(name for name in OPTIONS if name not in QUICK)],
)
def test_tokens_are_drawn_as_often_as_they_should_be(llama: Rig, options: dict[str, float]) -> None:
    (prompt,) = random_prompts((5,))
    sampling = replace(sampling_with(**options), n=5_000, max_tokens=1, temperature=1.3, seed=11)
    drawn = np.array([c.token_ids_T[0] for c in llama.engine.generate([prompt], sampling)[0]])
    (expected,) = plain_distributions(llama.plain, prompt, np.array([0]), sampling)
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    rare = expected * len(drawn) < 5
    merged = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected * len(drawn))]
    kept = merged[1] > 0
    assert stats.chisquare(merged[0][kept], merged[1][kept]).pvalue > 1e-3


def test_a_token_of_no_mass_is_never_drawn_even_at_the_ends() -> None:
    from retrain.modeling.distribution import draw

    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    ids, logprobs, _ = draw(logits, torch.tensor([0.0, 0.5, 1.0 - 1e-16], dtype=torch.float64))
    assert ids.tolist() == [1, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_the_filters_follow_a_distribution_worked_by_hand() -> None:
    from retrain.modeling.distribution import shape_logits

    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))

    def kept(**options: float) -> list[float]:
        shaped = shape_logits(logits, replace(Sampling(max_tokens=1), **options))  # type: ignore[arg-type]
        return [round(value, 4) for value in shaped.softmax(1)[0].tolist()]

    assert kept() == [0.4, 0.3, 0.2, 0.1]
    assert kept(top_k=2) == [0.5714, 0.4286, 0.0, 0.0]
    assert kept(top_p=0.5) == [0.5714, 0.4286, 0.0, 0.0]
    assert kept(top_p=0.05) == [1.0, 0.0, 0.0, 0.0]
    assert kept(min_p=0.4) == [0.4444, 0.3333, 0.2222, 0.0]
    # Of the two that top-k leaves, the likelier alone has 0.57 of the mass.
    assert kept(top_k=2, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
    assert kept(temperature=0.5) == [0.5333, 0.3, 0.1333, 0.0333]


def test_the_trainer_keeps_the_sampled_token_where_rounding_would_cut_it() -> None:
    from retrain.modeling.distribution import shape_logits

    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    shaped = shape_logits(logits, Sampling(max_tokens=1, top_k=2), keep=torch.tensor([3]))
    assert torch.isfinite(shaped[0]).tolist() == [True, True, False, True]


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 9])
def test_a_prompt_that_leaves_no_room_is_rejected(llama: Rig, length: int) -> None:
    prompts: list[IntArray] = [*random_prompts((4,)), *random_prompts((length,))]
    with pytest.raises(RolloutError, match=rf"prompt 1 has {length} tokens; the context holds {CONTEXT}"):
        llama.engine.generate(prompts, sampling_with())


def test_a_completion_ends_where_the_context_ends(rig: Rig) -> None:
    (group,) = rig.engine.generate(random_prompts((CONTEXT - 3,)), sampling_with())
    assert {len(c.token_ids_T) for c in group if c.finish_reason == "length"} <= {3}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_fifty_steps_leave_no_tensor_behind(family: str, tmp_path: Path) -> None:
    rig = build_rig(family, tmp_path)
    prompts, counts = random_prompts((4, 6)), []
    for step in range(50):
        rig.engine.sync(rig.policy)
        rig.engine.generate(prompts, Sampling(max_tokens=2, n=2, seed=step))
        if step % 10 == 9:
            gc.collect()
            counts.append(sum(type(held) is torch.Tensor for held in gc.get_objects()))
    assert len(set(counts[1:])) == 1


def test_sampling_leaves_the_weights_as_they_were(rig: Rig) -> None:
    before = {name: tensor.clone() for name, tensor in rig.policy.adapted.state_dict().items()}
    rig.engine.generate(random_prompts(LENGTHS), sampling_with())
    for name, tensor in rig.policy.adapted.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_sampling_sees_new_weights_from_the_next_sync_on(llama: Rig) -> None:
    policy = policy_for(llama.config)
    engine = PyTorchEngine(policy, Inference(), PlainTokenizer(), lambda *_: None)
    prompts, sampling = random_prompts(LENGTHS), sampling_with()
    before = tokens_of(engine.generate(prompts, sampling))
    for parameter in policy.adapter_state().values():
        parameter.data.mul_(2.0)
    engine.sync(policy)
    after = tokens_of(engine.generate(prompts, sampling))
    fresh = PyTorchEngine(policy, Inference(), PlainTokenizer(), lambda *_: None)
    assert after == tokens_of(fresh.generate(prompts, sampling))
    assert after != before


def test_sampling_takes_no_second_copy_of_what_the_adapter_leaves_alone(rig: Rig) -> None:
    held = {tensor.data_ptr() for tensor in rig.policy.causal_lm.state_dict().values()}
    assert rig.engine.model is not None
    own = {n for n, p in rig.engine.model.causal_lm.named_parameters() if p.data_ptr() not in held}
    adapted = {name for name, module in rig.policy.causal_lm.named_modules() if isinstance(module, LoraLayer)}
    assert own == {f"{name}.weight" for name in adapted}


def test_sampling_that_breaks_off_leaves_the_weights_as_they_were(llama: Rig) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = {name: tensor.clone() for name, tensor in llama.policy.adapted.state_dict().items()}
    engine = PyTorchEngine(llama.policy, Inference(), PlainTokenizer(), interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(random_prompts(LENGTHS), sampling_with())
    for name, tensor in llama.policy.adapted.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions takes a slower path
def test_in_bf16_the_mean_ratio_is_one_within_two_hundredths(llama: Rig) -> None:
    config = config_for(llama.folder, model__dtype="bf16")
    policy = policy_for(config)
    engine = PyTorchEngine(policy, config.inference, PlainTokenizer(), lambda *_: None)
    prompts, sampling = random_prompts(LENGTHS), sampling_with()
    learner = learner_for(policy, config)
    packed = pack(datums_of(prompts, engine.generate(prompts, sampling)), policy.device, with_history=False)
    with torch.no_grad():
        ratios = (learner.logprobs(packed) - packed.sampled_logprobs).exp()
    assert float(ratios.mean()) == pytest.approx(1.0, abs=2e-2)


def test_progress_gets_the_number_of_completions_are_finished(llama: Rig) -> None:
    reported: list[tuple[str, int, int]] = []
    engine = PyTorchEngine(llama.policy, Inference(), PlainTokenizer(), lambda *step: reported.append(step))
    engine.generate(random_prompts((4, 4)), Sampling(max_tokens=5, n=3))
    assert {phase for phase, _, _ in reported} == {"sampling"}
    assert {total for _, _, total in reported} == {6}


def test_the_slow_version_agrees_with_a_distribution_worked_by_hand() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    halved = plain_distribution(logits, np.array([0]), Sampling(max_tokens=1, repetition_penalty=2.0))
    np.testing.assert_allclose(halved, np.array([0.16, 0.3, 0.2, 0.1]) / 0.76)
