"""The student on a GPU: over the policy's tensors, and coming over from CPU memory for each use."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.tiny import PlainTokenizer, config_for, learner_for, policy_for, random_datums, random_prompts, write_model

from retrain.backends import FrozenModel
from retrain.backends.local.frozen import FrozenEngine, OffloadedEngine, build_frozen
from retrain.config import TrainConfig
from retrain.modeling.policy import Policy
from retrain.types import Sampling

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(max_tokens=12, n=2, temperature=0.9, seed=3)
PROMPTS = random_prompts([4, 9, 6])


def lend(policy: Policy, config: TrainConfig) -> FrozenModel:
    return build_frozen(policy, config, PlainTokenizer(), lambda line: None, lambda *_: None)


def drawn(student: FrozenModel) -> list[list[int]]:
    groups = student.engine.generate(PROMPTS, SAMPLING)
    return [completion.token_ids_T.tolist() for group in groups for completion in group]


def test_the_base_stays_what_it_was_while_the_policy_learns(tmp_path: Path) -> None:
    config = config_for(write_model(tmp_path), backend__devices="gpu:0")
    policy = policy_for(config, device="cuda")
    learner = learner_for(policy, config)
    student = lend(policy, config)
    before = drawn(student)
    learner.step(random_datums([(5, 8), (3, 6)]), 0)
    assert drawn(student) == before
    engine = student.engine
    assert isinstance(engine, FrozenEngine)
    held = {tensor.data_ptr() for tensor in policy.causal_lm.parameters()}
    assert all(tensor.data_ptr() in held for tensor in engine.policy.causal_lm.parameters())
    engine.shutdown()


def test_an_offloaded_student_is_on_the_card_only_while_it_samples(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    own = {"algorithm__advantage_mode": "grpo", "teaching__enabled": True, "teaching__student_model": str(model)}
    config = config_for(model, backend__devices="gpu:0", memory__offload_untrained_models=True, **own)
    student = lend(policy_for(config, device="cuda"), config)
    engine = student.engine
    assert isinstance(engine, OffloadedEngine)
    first = drawn(student)
    assert {parameter.device.type for parameter in engine.policy.causal_lm.parameters()} == {"cpu"}
    assert drawn(student) == first
