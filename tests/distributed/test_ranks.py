from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from retrain.backends.local.learner import Learner, Size
from retrain.config import TrainConfig
from retrain.distributed.build import build_rank
from retrain.distributed.learner import RankedLearner
from retrain.distributed.place import Place
from retrain.distributed.shares import share_datums
from retrain.tokens import load_tokenizer
from retrain.types import Sampling, StepMetrics
from tests.distributed.ranks import on_ranks
from tests.e2e.tiny import config_for, policy_for, random_datums, random_prompts, write_model, write_tokenizer

SIZES = [(5, 7), (6, 9), (4, 20), (8, 3), (5, 1), (7, 11), (3, 2)]
STEPS = 3

# Everything that the ranks must agree on with a single process, in one launch for each number of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "adapter": {"kl__beta": 0.1, "kl__sync_ref_model": True, "kl__ref_model_sync_steps": 2},
    "whole model": {"model__lora_rank": 0, "kl__beta": 0.1, "loss__type": "dr_grpo"},
    "small batches": {"memory__micro_batch_tokens": 24, "loss__grad_clip": 0.01, "training__weight_decay": 0.1},
    "more ranks than rows": {},
}
# DeepSpeed's stage 3 has a fixed reference only, and only where an adapter can be switched off.
VARIANTS_OF_STAGE_3: dict[str, dict[str, Any]] = {
    "fixed reference": {"kl__beta": 0.1},
    "whole model, no reference": {"model__lora_rank": 0, "training__weight_decay": 0.1},
    "small batches": VARIANTS["small batches"],
    "more ranks than rows": {},
}
ALL_VARIANTS = VARIANTS | VARIANTS_OF_STAGE_3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def configured(model: Path, variant: str, **more: Any) -> TrainConfig:
    # With a tiny eps, Adam turns the sign of a gradient that is nothing but rounding into a whole step.
    return config_for(model, training__lr=1e-4, optimizer__eps=1e-3, **ALL_VARIANTS[variant], **more)


def datums_for(variant: str, step: int) -> list[Any]:
    return random_datums(SIZES[:1] if variant == "more ranks than rows" else SIZES, seed=step)


def alone(config: TrainConfig, variant: str) -> tuple[list[StepMetrics], dict[str, torch.Tensor]]:
    learner = Learner(policy_for(config, trained=False), config, lambda line: None)
    told = [learner.step(datums_for(variant, step), step) for step in range(STEPS)]
    return told, learner.state()


def together(place: Place, config: TrainConfig, variant: str, folder: Path) -> list[StepMetrics]:
    """The same steps by several ranks, a checkpoint in the middle, and greedy samples."""
    backend = build_rank(config, place, load_tokenizer(config.model.model), lambda line: None, lambda *_: None)
    learner = backend.learner
    assert isinstance(learner, RankedLearner)
    told = []
    for step in range(STEPS):
        datums = datums_for(variant, step)
        told.append(learner.take_step(share_datums(datums, place.world)[place.rank], Size.of(datums), step))
        if step == STEPS - 2:
            backend.save(folder) if not learner.is_whole or place.leads else None
    dist.barrier()
    backend.load(folder)
    again = learner.take_step(share_datums(datums, place.world)[place.rank], Size.of(datums), STEPS - 1)
    assert again["loss"] == pytest.approx(told[-1]["loss"], abs=1e-7)
    engine = backend.sampler(STEPS)
    first = engine.generate(random_prompts([4, 5]), Sampling(max_tokens=4, n=2, seed=1))
    assert len(first) == 2
    state = learner.state()
    return told, {name: tensor.numpy() for name, tensor in state.items()}, [c.token_ids_T for g in first for c in g]


def every_variant(place: Place, model: Path, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return {
        variant: together(place, configured(model, variant, **more), variant, folder / variant) for variant in VARIANTS
    }


@pytest.mark.parametrize("more", [{}, {"distributed__fsdp": True}], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_the_steps_of_a_single_process(model: Path, tmp_path: Path, world: int, more: Any) -> None:
    for variant in VARIANTS:
        (tmp_path / variant).mkdir()
    on_each = on_ranks(world, every_variant, model, tmp_path, more)
    for variant in VARIANTS:
        expected, state = alone(configured(model, variant), variant)
        for told, found, _ in (rank[variant] for rank in on_each):
            for step in range(STEPS):
                assert told[step] == pytest.approx(expected[step], abs=1e-5, rel=1e-5)
            assert found.keys() == state.keys()
            for name, tensor in state.items():
                torch.testing.assert_close(torch.from_numpy(found[name]), tensor, atol=1e-5, rtol=1e-4)
        assert all((rank[variant][2][0] == on_each[0][variant][2][0]).all() for rank in on_each)
