r"""A score cache: equal answers to one reference are scored once, within a batch and across steps.

It is in front of the worker processes, so that they share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from retrain.rewards.match import answer_of, final_answer
from retrain.rewards.wire import Item, RewardSpec
from retrain.types import Score

MAX_CACHED = 65_536
_MAX_LENGTH = 2000
_NO_ANSWER = Score(0.0, "wrong")

Key = tuple[str, str]


class ScoreCache:
    """An LRU cache of scores by answer and reference."""

    def __init__(self, think_boxes: bool, most: int = MAX_CACHED) -> None:
        self._think_boxes = think_boxes
        self._most = most
        self._known: OrderedDict[Key, Score] = OrderedDict()
        self.reused = 0
        """Number of cache hits, including equal answers in a batch."""

    @classmethod
    def of(cls, spec: RewardSpec) -> ScoreCache | None:
        """A cache for rewards that depend only on answer and reference; None for others."""
        if spec.weighted or not spec.terms[0].reads_box:
            return None
        return cls(spec.terms[0].think_boxes)

    def score(self, items: Sequence[Item], compute: Callable[[list[Item]], list[Score]]) -> list[Score]:
        """Score all items, calling `compute` only for distinct ones that are not in the cache."""
        keys = [(final_answer(item.response, self._think_boxes), answer_of(item.reference)) for item in items]
        scores = {key: self._known[key] for key in keys if key in self._known}
        scores |= {key: _NO_ANSWER for key in keys if not key[0]}
        fresh = {key: item for key, item in zip(keys, items, strict=True) if key not in scores}
        scores |= zip(fresh, compute(list(fresh.values())), strict=True)
        self.reused += len(items) - len(fresh) - sum(not answer for answer, _ in keys)
        self._keep(scores)
        return [scores[key] for key in keys]

    def _keep(self, scores: dict[Key, Score]) -> None:
        """Store scores, but not errors and timeouts, which may be transient."""
        for key, score in scores.items():
            if score.counts and key[0] and len(key[0]) + len(key[1]) <= _MAX_LENGTH:
                self._known[key] = score
                self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
