"""Detects planning tokens (steering the solution) as opposed to execution tokens (carrying it out)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from retrain.errors import PluginError, blaming
from retrain.plugins import REGISTRIES
from retrain.types import BoolArray

if TYPE_CHECKING:
    from retrain.config.schema import Planning

__all__ = ["DetectorClass", "PlanningDetector", "build_detector"]


@runtime_checkable
class PlanningDetector(Protocol):
    """Marks planning tokens."""

    def detect(self, token_texts: Sequence[str]) -> BoolArray:
        """One True or False for each token of a completion, given the tokens' texts in order."""


@runtime_checkable
class DetectorClass(Protocol):
    """Interface of detector classes."""

    def from_config(self, planning: Planning, strategic_grams: str) -> PlanningDetector:
        """Build one from `[planning]` and `[logging] strategic_grams`; a classmethod on the detector."""


def build_detector(planning: Planning, strategic_grams: str = "", search_paths: Sequence[str] = ()) -> PlanningDetector:
    """Build `[planning] detector`: a built-in, an installed plugin, or a dotted path."""
    name = planning.detector
    found = REGISTRIES["planning"].load(name, search_paths)
    if not isinstance(found, DetectorClass):
        raise PluginError(
            f"planning plugin {name!r} has no from_config(planning, strategic_grams). "
            "Try: name a class with that classmethod and with detect(token_texts)."
        )
    with blaming(f"planning plugin {name!r}", "in from_config"):
        detector = found.from_config(planning, strategic_grams)
    if not isinstance(detector, PlanningDetector):
        raise PluginError(
            f"planning plugin {name!r}: from_config returned {type(detector).__name__}, without detect()."
        )
    return _CheckedDetector(name, detector)


class _CheckedDetector:
    """Validates a plugin's masks and names the plugin in errors."""

    def __init__(self, name: str, detector: PlanningDetector) -> None:
        self._name = name
        self._detector = detector

    def detect(self, token_texts: Sequence[str]) -> BoolArray:
        """Detect, and check that there is a value per token."""
        with blaming(f"planning plugin {self._name!r}", "in detect"):
            mask = np.asarray(self._detector.detect(token_texts), dtype=np.bool_)
        if mask.shape != (len(token_texts),):
            raise PluginError(
                f"planning plugin {self._name!r} returned a mask of shape {mask.shape} for {len(token_texts)} tokens."
            )
        return mask
