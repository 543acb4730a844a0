"""Rows whose log-probs are not the trainer's, when several ranks train: all of them leave the same rows out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from retrain.backends.local.learner import Learner, StepSize
from retrain.checks.agreement import FLOAT32, Agreement, DisagreementError
from retrain.config import TrainConfig
from retrain.distributed.balance import balance_datums
from retrain.distributed.build import build_rank
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.ranks import RankInfo
from retrain.types import Datum
from tests.distributed.ranks import on_ranks
from tests.e2e.tiny import config_for, policy_for, random_datums, write_model, write_tokenizer

SIZES = [(5, 7), (6, 9), (4, 20), (8, 3), (7, 11), (3, 4)]


def sampled_rows(config: TrainConfig, altered: int) -> list[Datum]:
    """Rows with the policy's own log-probs, one of them altered in each of the last `altered` rows."""
    learner = Learner(policy_for(config, trained=False), config, lambda line: None)
    datums = []
    for index, datum in enumerate(random_datums(SIZES, seed=0)):
        with torch.no_grad():
            logprobs_T = learner.logprobs(learner.pack([datum])).numpy().astype(np.float32)
        if index >= len(SIZES) - altered:
            logprobs_T[1] -= 3.0
        datums.append(replace(datum, logprobs_T=logprobs_T, group=index // 2, index=index % 2))
    return datums


@dataclass(frozen=True)
class Outcome:
    excluded: int
    rejected: bool
    state: dict[str, np.ndarray]


def take_part(rank_info: RankInfo, model: Path, altered: int, sharded: bool) -> Outcome:
    dist.init_process_group("gloo")
    config = config_for(model, distributed__fsdp=sharded)
    learner = build_rank(
        config, rank_info, load_tokenizer(config.model.model), lambda line: None, lambda *_: None
    ).learner
    datums = sampled_rows(config_for(model), altered)
    learner.take_step(balance_datums(datums, rank_info.world)[rank_info.rank], StepSize.of(datums), 0)
    assert learner.report is not None
    state = {name: tensor.numpy() for name, tensor in learner.state().items()}
    return Outcome(learner.report.excluded, learner.report.rejected, state)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("altered", [1, 3])
def test_ranks_leave_out_the_rows_that_a_single_process_leaves_out(tmp_path: Path, altered: int, sharded: bool) -> None:
    model = write_tokenizer(write_model(tmp_path / "model", gain=2.0))
    config = config_for(model)
    alone = Learner(policy_for(config, trained=False), config, lambda line: None)
    alone.agreement = Agreement(FLOAT32, lambda line: None)
    if altered == 1:
        assert alone.step(sampled_rows(config, altered))["rows_excluded"] == 2
    else:
        with pytest.raises(DisagreementError, match="3 of 6 rows"):
            alone.step(sampled_rows(config, altered))
    expected = {name: tensor.numpy() for name, tensor in alone.state().items()}
    for found in on_ranks(2, take_part, model, altered, sharded):
        assert (found.excluded, found.rejected) == ({1: 2, 3: 4}[altered], altered == 3)
        for name, tensor in expected.items():
            np.testing.assert_allclose(found.state[name], tensor, atol=1e-5, rtol=1e-5, err_msg=name)
