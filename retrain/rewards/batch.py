"""The interface for scoring the completions of a step: worker pool, LLM judge, or both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from retrain.rewards.wire import Item
from retrain.types import Outcome, Score, StepMetrics

CORRECT_FROM = 1.0
"""Default of `[reward] correct_from`: rewards of at least this value count as correct."""
# Tolerance for weights that add up to 1 except for rounding.
ROUNDING = 1e-9


def outcome_of(value: float, correct_from: float = CORRECT_FROM) -> Outcome:
    """Whether a reward counts as correct."""
    return "right" if value >= correct_from - ROUNDING else "wrong"


class BatchReward(ABC):
    """Scores batches of completions; a context manager that calls `close`."""

    @abstractmethod
    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        """Score every item, in order. Failures of single items do not raise."""

    @abstractmethod
    def metrics(self) -> StepMetrics:
        """Metrics of scoring since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Release resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
