"""Trackio, when [logging] trackio_project is set: a local dashboard, or a Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.runtime.packages import missing
from retrain.storage.logs import TRACKIO_NAME
from retrain.tracking import DashboardTracker

try:
    import trackio
except ImportError as error:
    raise missing("trackio", "[logging] trackio_project") from error


class TrackioTracker(DashboardTracker):
    """Sends each step's metrics to Trackio; a resumed run keeps its name."""

    table = trackio.Table

    def start(self, config: TrainConfig) -> None:
        """Open the run, or resume the one of this folder."""
        logging, name_file = config.logging, self.log_dir / TRACKIO_NAME
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
