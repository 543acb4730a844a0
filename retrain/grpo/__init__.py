"""TRL's GRPO trainer with retrain's sampling and packed log-probs inside: `from retrain.grpo import GRPOTrainer`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrain.runtime.packages import missing
from retrain.runtime.threads import limit_openmp_spinning

if TYPE_CHECKING:
    from retrain.grpo.config import GRPOConfig
    from retrain.grpo.run import run_settings
    from retrain.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "run_settings"]

if "torch" not in sys.modules:
    limit_openmp_spinning()

MODULES = {"GRPOConfig": "config", "GRPOTrainer": "trainer", "run_settings": "run"}


def __getattr__(name: str) -> Any:
    """Import TRL when it is used: composing a run's settings does not need it."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("trl")
    except ImportError as error:
        raise missing("trl", "retrain.grpo") from error
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
