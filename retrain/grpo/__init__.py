"""TRL's GRPO trainer with retrain's sampling and packed log-probs inside: `from retrain.grpo import GRPOTrainer`."""

from __future__ import annotations

from retrain.errors import MissingExtraError

try:
    import trl
except ImportError as error:
    raise MissingExtraError(
        'retrain.grpo needs the package trl, which is not installed.  Try: pip install -e ".[grpo]"'
    ) from error

from retrain.grpo.config import GRPOConfig
from retrain.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "trl"]
