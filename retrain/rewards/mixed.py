"""Weighted terms that include an LLM judge: the pool computes the others in the meantime."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from retrain.errors import PluginError
from retrain.rewards.batch import CORRECT_FROM, BatchReward, outcome_of
from retrain.rewards.custom import check_bounds
from retrain.rewards.judge import JudgeReward
from retrain.rewards.weighted import WeightedScore, distinct_names
from retrain.rewards.wire import Item, TermSpec
from retrain.types import Score, StepMetrics


class MixedReward(BatchReward):
    """`Σ weight · term` of the judge and of the terms in `pool`; owns both. If one fails, the item fails."""

    def __init__(
        self,
        judge: JudgeReward,
        terms: Sequence[TermSpec],
        pool: BatchReward | None,
        correct_from: float = CORRECT_FROM,
    ) -> None:
        self._judge = judge
        self._correct_from = correct_from
        self._pool = pool
        self._weights = dict(zip(distinct_names([term.name for term in terms]), (t.weight for t in terms), strict=True))

    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        """Score every item, in order."""
        pending = self._judge.begin(items)
        try:
            computed = self._pool.score(items) if self._pool else [WeightedScore(0.0, "wrong")] * len(items)
            return [self._add(one, other) for one, other in zip(computed, pending.result(), strict=True)]
        except BaseException:
            pending.cancel()
            raise

    def metrics(self) -> StepMetrics:
        """Metrics of the judge and of the pool."""
        return self._judge.metrics() | (self._pool.metrics() if self._pool else {})

    def close(self) -> None:
        """Close both."""
        with ExitStack() as stack:
            stack.callback(self._judge.close)
            if self._pool:
                stack.callback(self._pool.close)

    def _add(self, computed: Score, judged: Score) -> Score:
        if computed.outcome == "none":
            computed = WeightedScore(0.0, "wrong")
        if not computed.counts:
            return computed
        if not judged.counts:
            return replace(judged, detail=f"{judged.detail}\nin the reward term 'judge'")
        assert isinstance(computed, WeightedScore)
        terms = {**computed.terms, **dict.fromkeys(self._weights, judged.value)}
        try:
            value = check_bounds(
                computed.value + judged.value * sum(self._weights.values()), "the weighted terms add up to"
            )
        except PluginError as error:
            return Score(0.0, "error", str(error))
        return WeightedScore(value, outcome_of(value, self._correct_from), terms=terms)
