"""Trackers: where a run's numbers go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from retrain.config import TrainConfig
from retrain.isolation.redaction import redact
from retrain.types import Example, Group, StepMetrics

__all__ = ["EveryFew", "Tracker", "Trackers", "completions_table", "metric_name", "prompt_text"]

TABLE_COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]

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


class EveryFew:
    """Tells a tracker of every n-th step and of every evaluation; of none when n is 0."""

    def __init__(self, every: int, tracker: Tracker) -> None:
        self.every = every
        self.tracker = tracker

    def start(self, config: TrainConfig) -> None:
        """Start it."""
        self.tracker.start(config)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Tell it, if the step is one of those."""
        if self.every and ((step + 1) % self.every == 0 or "eval_pass_at_1" in metrics):
            self.tracker.log(step, metrics, groups)

    def finish(self) -> None:
        """Finish it."""
        self.tracker.finish()


def completions_table(step: int, groups: Sequence[Group]) -> dict[str, Any]:
    """Every completion of a step as a row, for `Table(**...)` of wandb and trackio."""
    rows = []
    for group in groups:
        earned = [None] * len(group.completions_G) if group.advantages_G is None else group.advantages_G.tolist()
        for completion, score, advantage in zip(group.completions_G, group.scores_G, earned, strict=True):
            reward = score.value if score.counts else None
            rows.append([step, redact(prompt_text(group.example)), redact(completion.text), reward, advantage])
    return {"columns": TABLE_COLUMNS, "data": rows}


def prompt_text(example: Example) -> str:
    """What was asked, as one text."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in example.prompt)


def metric_name(key: str) -> str:
    """A metric's name on a dashboard: grouped where a group exists, else train/<key>."""
    if key.startswith("bp_"):
        return f"train/backpressure/{key[3:]}"
    return NAMES.get(key, f"train/{key}")
