"""Trackio, when [logging] trackio_project is set: a local dashboard, or a Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.runtime.packages import missing
from retrain.tracking import completions_table, metric_name
from retrain.types import Group, JsonObject, StepMetrics

try:
    import trackio
except ImportError as error:
    raise missing("trackio", "[logging] trackio_project") from error

NAME_FILE = "trackio_run_name"


class TrackioTracker:
    """Sends each step's metrics to Trackio; a resumed run keeps its name."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.run: Any = None

    def start(self, config: TrainConfig) -> None:
        """Open the run, or resume the one of this folder."""
        logging, name_file = config.logging, self.log_dir / NAME_FILE
        resumes = name_file.exists()
        try:
            self.run = trackio.init(
                project=logging.trackio_project,
                name=name_file.read_text().strip() if resumes else logging.wandb_run_name or config.condition,
                group=logging.wandb_group or None,
                config=config.model_dump(by_alias=True),
                resume="allow" if resumes else "never",
                embed=False,
            )
        except ValueError as error:
            raise ConfigError(f"[logging] trackio_project = {logging.trackio_project!r}: {error}") from error
        name_file.write_text(self.run.name)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Log under the same names as wandb."""
        values: JsonObject = {metric_name(key): value for key, value in metrics.items() if value is not None}
        if groups:
            values["completions"] = trackio.Table(**completions_table(step, groups))
        self.run.log(values, step=step)

    def finish(self) -> None:
        """Close the run."""
        if self.run is not None:
            self.run.finish()
