"""A weighted sum of rewards that keeps the value of each term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retrain.rewards.custom import call_reward, check_bounds, extras_of
from retrain.types import Score

if TYPE_CHECKING:
    from retrain.rewards import Reward


@dataclass(frozen=True)
class WeightedScore(Score):
    """A score with the unweighted value of each term."""

    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """One term: its name in logs, weight and reward."""

    name: str
    weight: float
    reward: Reward


class WeightedReward:
    """`Σ weight · term` over the terms that apply. If one raises, the score is an error."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = list(zip(distinct_names([term.name for term in terms]), terms, strict=True))
        self._extras = {name: extras_of(term.reward) for name, term in self._terms}

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras that any term takes."""
        return tuple(sorted({extra for extras in self._extras.values() for extra in extras}))

    def score_terms(self, response: str, reference: str, extras: Mapping[str, object]) -> dict[str, float]:
        """The unweighted value of each term that applies, by name."""
        values: dict[str, float] = {}
        for name, term in self._terms:
            wanted = {extra: extras[extra] for extra in self._extras[name]}
            try:
                value = call_reward(term.reward, response, reference, wanted)
            except BaseException as error:
                error.add_note(f"in the reward term {name!r}")
                raise
            if value is not None:
                values[name] = value
        return values

    def total(self, values: Mapping[str, float]) -> float:
        """The weighted sum, with the same bounds as a reward."""
        return check_bounds(
            sum(term.weight * values[name] for name, term in self._terms if name in values),
            "the weighted terms add up to",
        )

    def score(self, response: str, reference: str) -> float:
        """The weighted sum, for terms without extras."""
        return self.total(self.score_terms(response, reference, {}))


def distinct_names(names: Sequence[str]) -> list[str]:
    """Number the repeats: `match`, `match#2`."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result
