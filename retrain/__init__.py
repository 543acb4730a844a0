"""RLVR training for language models: one TOML, one command.

from retrain import load_config, train
result = train(load_config("retrain.toml", overrides={"training.seed": 42}))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.advantages import TransformSpec
    from retrain.config import TrainConfig, load_config
    from retrain.trainer import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "TransformSpec", "load_config", "train"]

# Loaded when first used: a plain `import retrain` must not pull in PyTorch.
_HOMES = {
    "TrainConfig": "retrain.config",
    "load_config": "retrain.config",
    "TransformSpec": "retrain.advantages",
    "TrainResult": "retrain.trainer",
    "train": "retrain.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
