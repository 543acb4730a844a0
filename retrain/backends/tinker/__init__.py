"""Training on a Tinker service: the weights are remote, and this machine needs neither a GPU nor PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from retrain.backends import Backend
from retrain.config import TrainConfig
from retrain.inference_engine import Progress
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.packages import missing

__all__ = ["build", "require_sdk"]


def build(config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress) -> Backend:
    """Connect to the service and create, or restore, the adapter to train."""
    require_sdk('[backend] backend = "tinker"')
    from retrain.backends.tinker.backend import connect_backend  # noqa: PLC0415  (imports the SDK, an optional extra)

    return connect_backend(config, tokenizer, log, progress)


def require_sdk(what: str) -> None:
    """Raise if the SDK, which `what` requires, is not installed."""
    if importlib.util.find_spec("tinker") is None:
        raise missing("tinker", what)
