"""Training steps by several ranks, compared with those of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from retrain.backends.local import make_engine
from retrain.backends.local.learner import Learner, StepSize
from retrain.config import TrainConfig
from retrain.distributed.balance import balance_datums
from retrain.distributed.build import build_rank
from retrain.distributed.learner import RankedLearner
from retrain.inference_engine import InferenceEngine
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.ranks import RankInfo
from retrain.types import Sampling, StepMetrics
from tests.distributed.ranks import on_ranks
from tests.e2e.tiny import config_for, policy_for, random_datums, random_prompts

SIZES = [(5, 7), (6, 9), (4, 20), (8, 3), (5, 1), (7, 11), (3, 2)]
STEPS = 3

# Everything that the ranks must agree on with a single process, in one launch for each number of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "adapter": {"kl__beta": 0.1, "kl__sync_ref_model": True, "kl__ref_model_sync_steps": 2},
    "whole model": {"model__lora_rank": 0, "kl__beta": 0.1, "loss__type": "dr_grpo"},
    "small batches": {"memory__micro_batch_tokens": 24, "loss__grad_clip": 0.01, "training__weight_decay": 0.1},
    "more ranks than rows": {},
}


def configured(model: Path, variant: str, **more: Any) -> TrainConfig:
    # With a tiny eps, Adam turns the sign of a gradient that is nothing but rounding into a whole step.
    return config_for(model, training__lr=1e-4, optimizer__eps=1e-3, **VARIANTS[variant], **more)


def datums_for(variant: str, step: int) -> list[Any]:
    return random_datums(SIZES[:1] if variant == "more ranks than rows" else SIZES, seed=step)


@dataclass(frozen=True)
class Outcome:
    """What came of the steps: metrics, parameters and moments, and completions drawn after them."""

    metrics: list[StepMetrics]
    state: dict[str, Any]
    tokens: list[list[int]]


def alone(config: TrainConfig, variant: str) -> Outcome:
    """The steps of a single process."""
    policy = policy_for(config, trained=False)
    learner = Learner(policy, config, lambda line: None)
    metrics = [learner.step(datums_for(variant, step), step) for step in range(STEPS)]
    engine = make_engine(config, policy, load_tokenizer(config.model.model), lambda line: None, lambda *_: None)
    return Outcome(metrics, {name: tensor.numpy() for name, tensor in learner.state().items()}, draw(engine))


def draw(engine: InferenceEngine) -> list[list[int]]:
    groups = engine.generate(random_prompts([4, 5]), Sampling(max_tokens=6, n=2, seed=1))
    return [completion.token_ids_T.tolist() for group in groups for completion in group]


def together(rank_info: RankInfo, config: TrainConfig, variant: str, folder: Path) -> Outcome:
    """The same steps as one of several ranks; the last is taken twice, the second time from a checkpoint."""
    backend = build_rank(config, rank_info, load_tokenizer(config.model.model), lambda line: None, lambda *_: None)
    learner = backend.learner
    assert isinstance(learner, RankedLearner)
    learner.agreement = None  # these datums' log-probs are made up

    def take(step: int) -> StepMetrics:
        datums = datums_for(variant, step)
        return learner.take_step(balance_datums(datums, rank_info.world)[rank_info.rank], StepSize.of(datums), step)

    metrics = [take(step) for step in range(STEPS - 1)]
    if rank_info.is_main or not learner.is_replicated:
        backend.save(folder)
    dist.barrier()
    take(STEPS - 1)
    backend.load(folder)
    metrics.append(take(STEPS - 1))
    state = {name: tensor.numpy() for name, tensor in learner.state().items()}
    return Outcome(metrics, state, draw(backend.sampler(STEPS)))


def every_variant(
    rank_info: RankInfo, model: Path, folder: Path, more: dict[str, Any], variants: Sequence[str]
) -> dict[str, Outcome]:
    dist.init_process_group("gloo")
    return {name: together(rank_info, configured(model, name, **more), name, folder / name) for name in variants}


def check_steps(world: int, model: Path, folder: Path, more: dict[str, Any], variants: Sequence[str]) -> None:
    """Every rank must come to what a single process comes to, and one process must be able to go on from there."""
    for variant in variants:
        (folder / variant).mkdir()
    on_each = on_ranks(world, every_variant, model, folder, more, variants)
    for variant in variants:
        config = configured(model, variant)
        expected = alone(config, variant)
        for found in (rank[variant] for rank in on_each):
            for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
            assert found.state.keys() == expected.state.keys()
            for name, tensor in expected.state.items():
                np.testing.assert_allclose(found.state[name], tensor, atol=1e-5, rtol=1e-5, err_msg=name)
            assert found.tokens == expected.tokens
        learner = Learner(policy_for(config, trained=False), config, lambda line: None)
        learner.load(folder / variant)
        metrics = learner.step(datums_for(variant, STEPS - 1), STEPS - 1)
        assert metrics == pytest.approx(expected.metrics[-1], abs=1e-5, rel=1e-5)
