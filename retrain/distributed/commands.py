"""Commands that rank 0 sends to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.backends.local.learner import StepSize
from retrain.config import TrainConfig
from retrain.types import Datum, IntArray, Sampling


@dataclass(frozen=True)
class Build:
    """Load the model."""

    config: TrainConfig


@dataclass(frozen=True)
class Sync:
    """Sync the newest weights to the engine."""

    step: int


@dataclass(frozen=True)
class Sample:
    """Sample completions for these prompts."""

    prompts: Sequence[IntArray]
    sampling: Sampling


@dataclass(frozen=True)
class Train:
    """Train on these datums; `size` is that of the global step."""

    datums: Sequence[Datum]
    size: StepSize
    step: int


@dataclass(frozen=True)
class Save:
    """Take part in gathering a checkpoint, which rank 0 writes."""

    path: Path


@dataclass(frozen=True)
class Load:
    """Restore a checkpoint."""

    path: Path


RankCommand = Build | Sync | Sample | Train | Save | Load
