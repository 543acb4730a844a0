"""GRPO from a Python script, in the style of TRL, on retrain's own loop: change the import and run it."""

from retrain.grpo.config import GRPOConfig
from retrain.grpo.trainer import GRPOTrainer, TrainOutput

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainOutput"]
