"""Run folders read back: metrics, evaluations, status; torn lines are left out, nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigError
from retrain.tracking.jsonl import EVALS, FILES, METRICS

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run, as far as its folder tells."""

    folder: Path
    name: str
    condition: str
    status: str
    config: TrainConfig
    metrics: list[Row]
    evals: list[Row]
    bytes: int
    """Size of its logs, which grows with every step."""

    @property
    def seed(self) -> int:
        """The seed it ran with."""
        return self.config.training.seed


def find_runs(folder: Path) -> list[RunRecord]:
    """The run in a folder, or those of a campaign, or those of every folder below it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.")
    places = [folder] if (folder / METRICS).is_file() else sorted(p.parent for p in folder.glob(f"**/{METRICS}"))
    return [read_run(place, folder) for place in places]


def read_run(place: Path, below: Path) -> RunRecord:
    """One run's folder."""
    config = load_config(place / "config.toml")
    rows = list(read_rows(place / METRICS))
    try:
        state = json.loads((place / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    return RunRecord(
        folder=place,
        name=place.name if place != below else place.resolve().name,
        condition=rows[-1]["condition"] if rows else config.condition,
        status=str(state.get("status", "unknown")),
        config=config,
        metrics=rows,
        evals=list(read_rows(place / EVALS)),
        bytes=sum((place / name).stat().st_size for name in FILES if (place / name).is_file()),
    )


def read_rows(path: Path) -> Iterator[Row]:
    """The whole rows of a JSONL file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
