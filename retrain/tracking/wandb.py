"""Weights & Biases, when [logging] wandb_project is set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.types import Group, StepMetrics

NAMES = {
    "mean_reward": "train/rewards/mean_reward",
    "correct_rate": "train/rewards/correct_rate",
    "running_correct_rate": "train/rewards/running_correct_rate",
    "exec_entropy_mean": "train/entropy/exec_mean",
    "exec_entropy_var": "train/entropy/exec_var",
    "plan_entropy_mean": "train/entropy/plan_mean",
    "plan_entropy_var": "train/entropy/plan_var",
}


class WandbTracker:
    """Sends each step's metrics to wandb; a resumed run goes on under the same id."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.run: Any = None

    def start(self, config: TrainConfig) -> None:
        """Open the run, or the one this folder began."""
        logging = config.logging
        id_file = self.log_dir / "wandb_run_id"
        try:
            self.run = self._open(config, id_file.read_text().strip() if id_file.exists() else None)
        except wandb.errors.Error as error:
            raise ConfigError(
                f"[logging] wandb_project = {logging.wandb_project!r}: {error}  "
                "Try: wandb login, or export WANDB_MODE=offline"
            ) from error
        id_file.write_text(self.run.id)

    def _open(self, config: TrainConfig, run_id: str | None) -> Any:
        logging = config.logging
        return wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_run_name or config.condition,
            entity=logging.wandb_entity or None,
            group=logging.wandb_group or None,
            tags=[tag.strip() for tag in logging.wandb_tags.split(",") if tag.strip()] or None,
            config=config.model_dump(by_alias=True),
            dir=str(self.log_dir),
            id=run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log under the documented names."""
        self.run.log({wandb_name(key): value for key, value in metrics.items() if value is not None}, step=step)

    def finish(self) -> None:
        """Close the run."""
        if self.run is not None:
            self.run.finish()


def wandb_name(key: str) -> str:
    """A metric's name in wandb: grouped where a group exists, else train/<key>."""
    if key.startswith("bp_"):
        return f"train/backpressure/{key[3:]}"
    return NAMES.get(key, f"train/{key}")
