"""The configuration class of GRPO runs."""

from retrain.grpo import GRPOConfig

__all__ = ["GRPOConfig"]
