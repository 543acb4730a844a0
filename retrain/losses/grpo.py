"""The `grpo` loss (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from retrain.losses.averages import SEQUENCE_MEAN
from retrain.losses.ppo import PPO


class GRPO(PPO):
    """PPO with the mean over the tokens of each sequence, then over sequences."""

    average = SEQUENCE_MEAN

    def on_tinker(self) -> None:
        """Always None: the service does not average over sequences."""
        return
