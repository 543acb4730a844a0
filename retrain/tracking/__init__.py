"""Trackers: where a run's numbers go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retrain.config import TrainConfig
from retrain.types import Group, StepMetrics

__all__ = ["Tracker", "Trackers", "metric_name"]

NAMES = {
    "mean_reward": "train/rewards/mean_reward",
    "correct_rate": "train/rewards/correct_rate",
    "running_correct_rate": "train/rewards/running_correct_rate",
    "exec_entropy_mean": "train/entropy/exec_mean",
    "exec_entropy_var": "train/entropy/exec_var",
    "plan_entropy_mean": "train/entropy/plan_mean",
    "plan_entropy_var": "train/entropy/plan_var",
}


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


def metric_name(key: str) -> str:
    """A metric's name on a dashboard: grouped where a group exists, else train/<key>."""
    if key.startswith("bp_"):
        return f"train/backpressure/{key[3:]}"
    return NAMES.get(key, f"train/{key}")
