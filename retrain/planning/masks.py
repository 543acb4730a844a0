"""Planning masks of a step's completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrain.planning import PlanningDetector
from retrain.types import BoolArray, Group


class PlanningMasks:
    """Planning masks by a detector, over the texts of a vocabulary."""

    def __init__(self, detector: PlanningDetector, texts: Sequence[str]) -> None:
        self.detector = detector
        self.texts = texts

    def of(self, groups: Sequence[Group], known: Mapping[int, list[BoolArray]] | None = None) -> list[list[BoolArray]]:
        """One mask per completion; `known` has those of some groups, by the group's `id`."""
        known = known or {}
        return [known[id(group)] if id(group) in known else self._detect(group) for group in groups]

    def _detect(self, group: Group) -> list[BoolArray]:
        return [self.detector.detect([self._text(i) for i in c.token_ids_T]) for c in group.completions_G]

    def _text(self, token: int) -> str:
        # Vocabularies are padded: an id beyond the tokenizer's can be sampled and has no text.
        return self.texts[token] if token < len(self.texts) else ""
