from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import retrain

HOMES = {
    "retrain": ["TrainConfig", "TrainResult", "TransformSpec", "load_config", "train"],
    "retrain.advantages": ["TransformSpec", "compute_advantages"],
    "retrain.backends": ["Backend", "Capabilities"],
    "retrain.schedules.backpressure": ["BackPressure", "NoBackPressure", "USLBackPressure"],
    "retrain.cli": ["main"],
    "retrain.config": ["TrainConfig", "load_config"],
    "retrain.data": ["ExampleOrder", "load_examples"],
    "retrain.inference_engine": ["InferenceEngine", "Progress"],
    "retrain.rewards": ["Reward", "RewardPool"],
    "retrain.advantages.sepa": ["SEPAController"],
    "retrain.squeeze": ["analyze_adapter", "compress_adapter"],
    "retrain.testing": ["FakeBackend", "ScriptedEngine"],
    "retrain.trainer": ["TrainResult", "train"],
}


@pytest.mark.parametrize("module", HOMES)
def test_public_names_are_where_the_documentation_says(module: str) -> None:
    assert [name for name in HOMES[module] if not hasattr(importlib.import_module(module), name)] == []


def test_the_package_exports_what_it_lists_and_nothing_else() -> None:
    assert sorted(retrain.__all__) == sorted(HOMES["retrain"])
    assert set(retrain.__all__) <= set(dir(retrain))
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = retrain.tarin


def test_every_listed_name_exists() -> None:
    for module in HOMES:
        loaded = importlib.import_module(module)
        assert [name for name in vars(loaded).get("__all__", ()) if not hasattr(loaded, name)] == [], module


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "peft", "wandb", "datasets")
    code = f"import retrain, retrain.config, retrain.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


def test_train_and_load_config_are_the_same_functions_everywhere() -> None:
    from retrain.config import load_config
    from retrain.trainer import train

    assert retrain.train is train
    assert retrain.load_config is load_config
