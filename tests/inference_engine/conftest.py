from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from e2e.tiny import FAMILIES, PlainTokenizer, config_for, policy_for, write_model

from retrain.config import TrainConfig
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.policy import Policy

from .plain import plain_model


@dataclass(frozen=True)
class Rig:
    """One family: its engine, and the same weights run by Hugging Face."""

    config: TrainConfig
    policy: Policy
    engine: PyTorchEngine
    plain: torch.nn.Module
    folder: Path


def build_rig(family: str, folder: Path) -> Rig:
    return build_rig_from(write_model(folder / "model", family), folder)


def build_rig_from(model: Path, folder: Path) -> Rig:
    config = config_for(model)
    policy = policy_for(config)
    engine = PyTorchEngine(policy, config.inference, PlainTokenizer(), lambda phase, done, total: None)
    return Rig(config, policy, engine, plain_model(model, policy, folder / "adapter"), model)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return build_rig(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return build_rig("llama", tmp_path_factory.mktemp("llama"))
