"""What scores the completions of a step: the pool of processes, a judge, or both added up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from retrain.rewards.wire import Item
from retrain.types import Outcome, Score, StepMetrics

CORRECT_FROM = 1.0
"""A reward of this much or more counts as a right answer, unless `[reward] correct_from` says otherwise."""
# Terms whose weights add up to 1 may fall short of it by a rounding error.
ROUNDING = 1e-9


def outcome_of(value: float, correct_from: float = CORRECT_FROM) -> Outcome:
    """Whether a reward is that of a right answer."""
    return "right" if value >= correct_from - ROUNDING else "wrong"


class BatchReward(ABC):
    """Scores many completions at once; a context manager that ends with `close`."""

    @abstractmethod
    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        """Score every item, in order. Never raises for what happens with one item."""

    @abstractmethod
    def metrics(self) -> StepMetrics:
        """What scoring cost since this was last asked, for the metrics of the step."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()
