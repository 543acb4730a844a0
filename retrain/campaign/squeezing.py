"""The LoRA rank analysis of a campaign's first run with an adapter, for campaigns with a [squeeze] table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import Run
from retrain.config import TrainConfig
from retrain.errors import ConfigError, RetrainError
from retrain.storage.checkpoint import STATE_FILE
from retrain.storage.logs import MANIFEST


class FirstRunAnalysis:
    """Runs in a thread, so that other runs do not wait; `collect` takes over its result."""

    def __init__(self, config: TrainConfig, manifest: Manifest) -> None:
        self.config = config
        self.manifest = manifest
        self.lines: list[str] = []
        self.found: dict[str, object] | None = None
        self.thread: threading.Thread | None = None

    def begin(self, run: Run) -> None:
        """Analyze a finished run, unless it has no adapter or one was analyzed before; that one again if extended."""
        if self.config.squeeze is None or self.thread is not None or not is_due(run, self.manifest):
            return
        self.thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        """Whether an analysis has begun and not ended."""
        return self.thread is not None and self.thread.is_alive()

    def collect(self, log: Callable[[str], None]) -> None:
        """Print and record the result once it is there."""
        if self.thread is None or self.is_running:
            return
        self.thread.join()
        while self.lines:
            log(self.lines.pop(0))
        if self.found is not None:
            self.manifest.table["squeeze"] = self.found
            self.manifest.write()
            self.found = None

    def _work(self, run: Run) -> None:
        # Slow to import, and only needed with a [squeeze] table.
        from retrain.squeeze import squeeze  # noqa: PLC0415

        assert self.config.squeeze is not None
        self.lines.append(f"\nLoRA-Squeeze of {run.name}:")
        try:
            settings = self.config.squeeze.model_copy(update={"adapter_path": adapter_of(run)})
            analysis = squeeze(settings, self.lines.append, run.config.model.lora_rank, run.config.model.base_url)
        except (RetrainError, OSError) as error:
            self.lines.append(f"  The analysis failed: {error}")
            return
        self.found = {
            "run": run.name,
            "steps": run.max_steps,
            "source_rank": analysis.source_rank,
            "recommended_rank": analysis.recommended_rank,
            "min_variance_retention": analysis.min_variance_retention,
            "ranks": [vars(row) for row in analysis.ranks],
        }
        if self.config.logging.wandb_project:
            self._send(self.manifest.folder)

    def _send(self, folder: Path) -> None:
        from retrain.tracking.wandb import log_squeeze  # noqa: PLC0415

        assert self.found is not None
        try:
            log_squeeze(self.config, folder, self.found)
        except Exception as error:
            self.lines.append(f"Warning: logging the analysis to wandb failed: {error}")


def is_due(run: Run, manifest: Manifest | None) -> bool:
    """Whether the adapter of a run is analyzed when it ends: of one that was analyzed before, if it is extended."""
    before = manifest.table.get("squeeze") if manifest is not None else None
    is_next = not before or (before["run"] == run.name and before.get("steps") != run.max_steps)
    return bool(run.config.model.lora_rank) and is_next


def check_analysis(config: TrainConfig, runs: Sequence[Run], folder: Path) -> None:
    """Raise if the analysis would fail whichever run ends first, which would only show after that run.

    `folder` is the campaign's, which may exist.
    """
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else None
    trained = [run.config for run in runs if is_due(run, manifest)]
    if config.squeeze is None or not trained:
        return
    # Slow to import, and only needed with a [squeeze] table.
    from retrain.squeeze.compress import check_target  # noqa: PLC0415
    from retrain.squeeze.run import check_ranks  # noqa: PLC0415

    failures = []
    for one in trained:
        try:
            if config.squeeze.output_path:
                source = Path(one.backend.adapter_path).expanduser()
                check_target(source, Path(config.squeeze.output_path).expanduser())
            check_ranks(config.squeeze, one.model.lora_rank)
        except ConfigError as error:
            failures.append(error)
    if len(failures) == len(trained):
        raise failures[0]


def adapter_of(run: Run) -> str:
    """The path of a finished run's adapter, which may be on a service."""
    state = run.folder / STATE_FILE
    stored = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    return str(stored.get("adapter") or run.config.backend.adapter_path)
