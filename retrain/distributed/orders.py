"""What rank 0 asks of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.backends.local.learner import Size
from retrain.config import TrainConfig
from retrain.types import Datum, IntArray, Sampling


@dataclass(frozen=True)
class Build:
    """Load the model."""

    config: TrainConfig


@dataclass(frozen=True)
class Sync:
    """Take over the newest weights for sampling."""

    step: int


@dataclass(frozen=True)
class Sample:
    """Draw completions of these prompts."""

    prompts: Sequence[IntArray]
    sampling: Sampling


@dataclass(frozen=True)
class Train:
    """Take part in a step with these datums; `size` is that of the whole step."""

    datums: Sequence[Datum]
    size: Size
    step: int


@dataclass(frozen=True)
class Save:
    """Take part in the writing of a checkpoint, which rank 0 does."""

    path: Path


@dataclass(frozen=True)
class Load:
    """Restore a checkpoint."""

    path: Path


Order = Build | Sync | Sample | Train | Save | Load
