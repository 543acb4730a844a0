"""Trackers: where a run's numbers go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retrain.config import TrainConfig
from retrain.types import Group, StepMetrics

__all__ = ["Tracker", "Trackers"]


class Tracker(Protocol):
    """Takes note of a run."""

    def start(self, config: TrainConfig) -> None:
        """The run begins, or goes on."""
        ...

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """A step is done."""
        ...

    def finish(self) -> None:
        """The run is over, however it ended."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers

    def start(self, config: TrainConfig) -> None:
        """Start each."""
        for tracker in self.trackers:
            tracker.start(config)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Tell each."""
        for tracker in self.trackers:
            tracker.log(step, metrics, groups)

    def finish(self) -> None:
        """Finish each."""
        for tracker in self.trackers:
            tracker.finish()
