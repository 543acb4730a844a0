r"""Equal answers to one reference are judged once: within a batch, and across the steps of a run.

It stands before the worker processes, so that an answer which one of them has judged costs the others nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from retrain.rewards.match import answer_of, final_answer
from retrain.rewards.wire import Item, RewardSpec
from retrain.types import Score

BOXED = ("match", "math")
"""Rewards that look at nothing but the last box and the reference."""

MOST_KEPT = 65_536
_LONGEST_KEPT = 2000
_NO_ANSWER = Score(0.0, "wrong")

Key = tuple[str, str]


class Repeats:
    """Scores by answer and reference, the most recently used ones."""

    def __init__(self, think_boxes: bool, most: int = MOST_KEPT) -> None:
        self._think_boxes = think_boxes
        self._most = most
        self._known: OrderedDict[Key, Score] = OrderedDict()
        self.reused = 0
        """How many scores were not computed, but taken from an equal answer."""

    @classmethod
    def of(cls, spec: RewardSpec) -> Repeats | None:
        """For a reward that depends on answer and reference alone; None for any other."""
        if spec.weighted or spec.terms[0].type not in BOXED:
            return None
        return cls(spec.terms[0].think_boxes)

    def score(self, items: Sequence[Item], judge: Callable[[list[Item]], list[Score]]) -> list[Score]:
        """Score all items, giving to `judge` only those that differ from each other and from all it has judged."""
        keys = [(final_answer(item.response, self._think_boxes), answer_of(item.reference)) for item in items]
        scores = {key: self._known[key] for key in keys if key in self._known}
        scores |= {key: _NO_ANSWER for key in keys if not key[0]}
        fresh = {key: item for key, item in zip(keys, items, strict=True) if key not in scores}
        scores |= zip(fresh, judge(list(fresh.values())), strict=True)
        self.reused += len(items) - len(fresh) - sum(not answer for answer, _ in keys)
        self._keep(scores)
        return [scores[key] for key in keys]

    def _keep(self, scores: dict[Key, Score]) -> None:
        """Errors and time-outs are not kept: another attempt may end otherwise."""
        for key, score in scores.items():
            if score.counts and key[0] and len(key[0]) + len(key[1]) <= _LONGEST_KEPT:
                self._known[key] = score
                self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
