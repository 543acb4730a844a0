"""Trackers record the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from retrain.config import TrainConfig
from retrain.isolation.redaction import redact
from retrain.types import Example, Group, JsonObject, StepMetrics

__all__ = [
    "DashboardTracker", "ThrottledTracker", "Tracker", "Trackers", "completions_table", "metric_name", "prompt_text",
]  # fmt: skip

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
    """Records a run."""

    def start(self, config: TrainConfig) -> None:
        """The run starts or resumes."""

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log a step."""

    def finish(self) -> None:
        """The run has ended, successfully or not."""


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers

    def start(self, config: TrainConfig) -> None:
        """Start all."""
        for tracker in self.trackers:
            tracker.start(config)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log to all."""
        for tracker in self.trackers:
            tracker.log(step, metrics, groups)

    def finish(self) -> None:
        """Finish all."""
        for tracker in self.trackers:
            tracker.finish()


class ThrottledTracker(Trackers):
    """Passes every n-th step and every evaluation to trackers; none if n is 0."""

    def __init__(self, every: int, *trackers: Tracker) -> None:
        super().__init__(trackers)
        self.every = every

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log the step if it is due."""
        if self.every and ((step + 1) % self.every == 0 or "eval_pass_at_1" in metrics):
            super().log(step, metrics, groups)


class DashboardTracker:
    """Sends each step's metrics to a dashboard, once `start` of a subclass has opened its run."""

    table: Callable[..., Any]

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.run: Any = None

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log under the documented names."""
        values: JsonObject = {metric_name(key): value for key, value in metrics.items() if value is not None}
        if groups:
            values["completions"] = self.table(**completions_table(step, groups))
        self.run.log(values, step=step)

    def finish(self) -> None:
        """Close the run."""
        if self.run is not None:
            self.run.finish()


def completions_table(step: int, groups: Sequence[Group]) -> JsonObject:
    """A row per completion, for `Table(**...)` of wandb and trackio."""
    rows = []
    for group in groups:
        earned = [None] * len(group.completions_G) if group.advantages_G is None else group.advantages_G.tolist()
        for completion, score, advantage in zip(group.completions_G, group.scores_G, earned, strict=True):
            reward = score.value if score.counts else None
            rows.append([step, redact(prompt_text(group.example)), redact(completion.text), reward, advantage])
    return {"columns": TABLE_COLUMNS, "data": rows}


def prompt_text(example: Example) -> str:
    """The prompt as one text."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in example.prompt)


def metric_name(key: str) -> str:
    """A metric's name on dashboards: its group, or train/<key>."""
    if key.startswith("bp_"):
        return f"train/backpressure/{key[3:]}"
    return NAMES.get(key, f"train/{key}")
