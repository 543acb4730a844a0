"""Adaptive teaching in TRL's trainer (to be written)."""

from typing import Any


class TeachingRun:
    def __init__(self, trainer: Any) -> None:
        raise NotImplementedError
