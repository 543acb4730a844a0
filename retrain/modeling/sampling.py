"""Sampling options of a configuration."""

from __future__ import annotations

from retrain.config import TrainConfig
from retrain.types import Sampling


def training_distribution(config: TrainConfig) -> Sampling:
    """The distribution of training completions and of their log-probs."""
    training = config.training
    return Sampling(
        max_tokens=training.max_tokens,
        n=training.group_size,
        temperature=training.temperature,
        top_p=training.top_p,
        top_k=training.top_k,
        min_p=training.min_p,
        repetition_penalty=training.repetition_penalty,
    )
