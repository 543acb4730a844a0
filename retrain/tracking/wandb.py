"""Weights & Biases, when [logging] wandb_project is set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import wandb

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.storage.logs import WANDB_ID
from retrain.tracking import DashboardTracker
from retrain.types import JsonObject

# wandb's limit.
MAX_TAG = 64


class WandbTracker(DashboardTracker):
    """Sends each step's metrics to wandb; a resumed run keeps its id."""

    table = wandb.Table

    def start(self, config: TrainConfig) -> None:
        """Open the run, or resume the one of this folder."""
        logging = config.logging
        id_file = self.log_dir / WANDB_ID
        try:
            self.run = self._open(config, id_file.read_text().strip() if id_file.exists() else None)
        except wandb.errors.Error as error:
            hint = (
                "" if os.environ.get("WANDB_MODE") == "offline" else "  Try: wandb login, or export WANDB_MODE=offline"
            )
            raise ConfigError(f"[logging] wandb_project = {logging.wandb_project!r}: {error}{hint}") from error
        id_file.write_text(self.run.id)

    def _open(self, config: TrainConfig, run_id: str | None) -> Any:
        logging = config.logging
        return wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_run_name or config.condition,
            entity=logging.wandb_entity or None,
            group=logging.wandb_group or None,
            tags=[tag.strip()[:MAX_TAG] for tag in logging.wandb_tags.split(",") if tag.strip()] or None,
            config=config.model_dump(by_alias=True),
            dir=str(self.log_dir),
            id=run_id,
            resume="allow",
            # Runs that share a model are open at the same time in one process.
            reinit="create_new",
            # Otherwise it would wrap the standard output of the process, from a thread.
            settings=wandb.Settings(console="off"),
        )


def log_squeeze(config: TrainConfig, folder: Path, analysis: JsonObject) -> None:
    """A run named squeeze-analysis with the table of ranks."""
    run = wandb.init(
        project=config.logging.wandb_project,
        entity=config.logging.wandb_entity or None,
        name="squeeze-analysis",
        job_type="squeeze",
        config={key: value for key, value in analysis.items() if key != "ranks"},
        dir=str(folder),
        reinit="create_new",
        settings=wandb.Settings(console="off"),
    )
    columns = ["rank", "mean", "minimum", "maximum"]
    table = wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in analysis["ranks"]])
    run.log({"squeeze/variance_kept": table, "squeeze/recommended_rank": analysis["recommended_rank"]})
    run.finish()
