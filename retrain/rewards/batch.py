"""What scores the completions of a step: the pool of processes, a judge, or both added up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from retrain.rewards.wire import Item
from retrain.types import Score, StepMetrics

RIGHT_FROM = 0.5
"""A reward of this much or more counts as a right answer."""


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
