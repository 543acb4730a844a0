"""Rules on how held-out completions are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.schema import AS_IN_TRAINING, TrainConfig
from retrain.errors import ConfigIssue


def evaluation_temperature_is_one(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Of the numbers below 0 only -1 means something."""
    temperature = config.eval.temperature
    if temperature < 0 and temperature != AS_IN_TRAINING:
        yield ConfigIssue(
            "[eval] temperature", f"must be -1 or at least 0, got {temperature}.", "Try: temperature = -1.0"
        )


def evaluation_samples_differ(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Greedy decoding gives the same completion each time."""
    if config.eval.every and config.eval.temperature == 0 and config.eval.samples > 1:
        yield ConfigIssue(
            "[eval] samples",
            f"= {config.eval.samples} would be so many times the same completion: [eval] temperature = 0 is greedy.",
            "Try: samples = 1, or temperature = -1.0 for that of training",
        )
