"""The `dr_grpo` loss (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from retrain.losses.averages import CONSTANT_LENGTH
from retrain.losses.ppo import PPO


class DrGRPO(PPO):
    """PPO with a constant denominator."""

    average = CONSTANT_LENGTH
