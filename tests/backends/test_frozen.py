"""A student beside the policy: the base over the same tensors, or another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.tiny import PlainTokenizer, config_for, learner_for, policy_for, random_datums, random_prompts, write_model

from retrain.backends import FrozenModel, FrozenModelProvider
from retrain.backends.local import LocalBackend
from retrain.backends.local.frozen import FrozenEngine, OffloadedEngine, build_frozen, without_adapter
from retrain.backends.local.split import SplitBackend
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.policy import Policy
from retrain.testing import FakeBackend, ScriptedEngine
from retrain.types import Completion, Sampling

SAMPLING = Sampling(max_tokens=12, n=2, temperature=0.9, seed=3)
PROMPTS = random_prompts([4, 9, 6, 2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), "llama", layers=1)


def lend(policy: Policy, config: TrainConfig) -> FrozenModel:
    return build_frozen(policy, config, PlainTokenizer(), lambda line: None, lambda *_: None)


def tokens(drawn: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [one.token_ids_T.tolist() for group in drawn for one in group]


def test_the_base_is_sampled_whatever_the_adapter_has_learned(model: Path) -> None:
    config = config_for(model)
    untrained, policy = policy_for(config, trained=False), policy_for(config, trained=True)
    expected = lend(untrained, config).engine.generate(PROMPTS, SAMPLING)
    student = lend(policy, config)
    assert tokens(student.engine.generate(PROMPTS, SAMPLING)) == tokens(expected)
    learner_for(policy, config).step(random_datums([(5, 8), (3, 6)]), 0)
    assert tokens(student.engine.generate(PROMPTS, SAMPLING)) == tokens(expected)
    taught = PyTorchEngine(policy, config.inference, PlainTokenizer(), lambda *_: None)
    assert tokens(taught.generate(PROMPTS, SAMPLING)) != tokens(expected)


def test_the_base_is_no_second_copy_of_the_weights(model: Path) -> None:
    policy = policy_for(config_for(model))
    base = without_adapter(policy)
    held = {tensor.data_ptr() for tensor in policy.causal_lm.parameters()}
    assert all(tensor.data_ptr() in held for tensor in base.causal_lm.parameters())
    assert base.rank == 0 and not any("lora" in name for name, _ in base.causal_lm.named_parameters())
    # Taking the adapter off here leaves it on there.
    assert any("lora" in name for name, _ in policy.causal_lm.named_parameters())


def test_what_is_drawn_depends_on_seed_and_prompt_alone(model: Path) -> None:
    engine = lend(policy_for(config_for(model)), config_for(model)).engine
    assert isinstance(engine, FrozenEngine)
    together = engine.generate(PROMPTS, SAMPLING)
    backwards = engine.generate(PROMPTS[::-1], SAMPLING)[::-1]
    alone = [engine.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    assert tokens(together) == tokens(backwards) == tokens(alone)
    twice = engine.generate([PROMPTS[0], PROMPTS[0]], SAMPLING)
    assert tokens(twice[:1]) == tokens(twice[1:]) and tokens(twice)[0] != tokens(twice)[1]
    reseeded = engine.generate(PROMPTS, Sampling(max_tokens=12, n=2, temperature=0.9, seed=4))
    assert tokens(reseeded) != tokens(together)


def test_another_model_is_loaded_frozen(model: Path, other: Path) -> None:
    config = config_for(
        model, algorithm__advantage_mode="grpo", teaching__enabled=True, teaching__student_model=str(other)
    )
    logged: list[str] = []
    policy = policy_for(config)
    lent = build_frozen(policy, config, PlainTokenizer(), logged.append, lambda *_: None)
    assert logged == [f"Loading student: {other} on cpu..."]
    engine = lent.engine
    assert isinstance(engine, FrozenEngine)
    assert type(engine.policy.causal_lm).__name__ == "LlamaForCausalLM"
    assert not any(parameter.requires_grad for parameter in engine.policy.causal_lm.parameters())
    base = lend(policy, config_for(model)).engine
    assert tokens(engine.generate(PROMPTS, SAMPLING)) != tokens(base.generate(PROMPTS, SAMPLING))


def test_full_finetuning_has_a_frozen_copy_for_a_student(model: Path) -> None:
    config = config_for(model, model__lora_rank=0)
    policy = policy_for(config, trained=False)
    student = lend(policy, config)
    before = tokens(student.engine.generate(PROMPTS, SAMPLING))
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.mul_(-0.5)
    student.engine.sync(policy)
    assert tokens(student.engine.generate(PROMPTS, SAMPLING)) == before


def test_a_student_without_weights_is_rejected_by_the_option_that_names_it(model: Path, tmp_path: Path) -> None:
    config = config_for(
        model, algorithm__advantage_mode="grpo", teaching__enabled=True, teaching__student_model=str(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"\[teaching\] student_model = "):
        lend(policy_for(config), config)


def test_a_student_that_waits_in_cpu_memory_draws_the_same(model: Path) -> None:
    config = config_for(model)
    student = without_adapter(policy_for(config))
    parts = (student, config.inference, PlainTokenizer(), lambda *_: None)
    offloaded = OffloadedEngine(*parts)
    for _ in range(2):
        assert tokens(offloaded.generate(PROMPTS, SAMPLING)) == tokens(FrozenEngine(*parts).generate(PROMPTS, SAMPLING))
    offloaded.sync(None)
    offloaded.shutdown()


def test_the_local_backends_lend_and_a_plain_one_does_not(model: Path) -> None:
    config = config_for(model)
    policy = policy_for(config)
    engine = PyTorchEngine(policy, config.inference, PlainTokenizer(), lambda *_: None)
    split = SplitBackend(learner_for(policy, config), policy.clone_with_new_adapter(), engine)
    for backend in (LocalBackend(learner_for(policy, config), engine), split):
        assert isinstance(backend, FrozenModelProvider)
        lent = backend.frozen(config, PlainTokenizer(), lambda line: None, lambda *_: None)
        assert lent.context_length == policy.context_length
        assert len(lent.engine.generate(PROMPTS[:1], SAMPLING)[0]) == 2
    split.close(None)
    assert not isinstance(FakeBackend(ScriptedEngine(lambda *given: "")), FrozenModelProvider)


def test_the_students_log_probs_are_those_of_the_base(model: Path) -> None:
    config = config_for(model)
    policy = policy_for(config)
    (drawn,), (again,) = (
        lend(policy, config).engine.generate(PROMPTS[:1], SAMPLING),
        PyTorchEngine(without_adapter(policy), config.inference, PlainTokenizer(), lambda *_: None).generate(
            PROMPTS[:1], Sampling(max_tokens=12, n=8, temperature=0.9, seed=1)
        ),
    )
    # Both draw from one distribution: first tokens that agree have the same log-prob.
    first = {int(one.token_ids_T[0]): float(one.logprobs_T[0]) for one in again}
    for one in drawn:
        if int(one.token_ids_T[0]) in first:
            assert np.isclose(first[int(one.token_ids_T[0])], float(one.logprobs_T[0]), atol=1e-6)
