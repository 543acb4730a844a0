r"""The `math` reward: the last `\boxed{…}` of the response against the reference, by symbolic comparison.

The comparison is math-verify's. Its own time limits rely on a signal that only reaches a main thread, so they are
off here: the scoring process is killed from outside when it takes too long.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from math_verify import parse, verify

from retrain.rewards.match import answer_of, equal_as_text, last_boxed, normalise

# The longest answer of the MATH training set has 135 characters; symbolic work on far longer ones is never worthwhile.
LONGEST_ANSWER = 1000
_KEPT_REFERENCES = 16_384

# `2516_8`: math-verify would drop the base and accept 2516.
_BASE_SUBSCRIPT = re.compile(r"-?[0-9A-Za-z.]+_\{?\d+\}?")


@lru_cache(maxsize=_KEPT_REFERENCES)
def _parse_reference(gold: str) -> list[object]:
    return _parse_box(gold)


def _parse_box(answer: str) -> list[object]:
    parsed: list[object] = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    return parsed


class MathReward:
    """1.0 when math-verify finds the response's answer equal to the reference, else 0.0."""

    def __init__(self) -> None:
        # It warns, at every start, that its own time limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # The first parse builds the grammar; that belongs to the start, not to the first item's time limit.
        _parse_box("1")

    def score(self, response: str, reference: str) -> float:
        """Compare as text first, then as mathematics; answers with a base subscript only as text."""
        answer, gold = last_boxed(response), answer_of(reference)
        if not answer or len(answer) > LONGEST_ANSWER:
            return 0.0
        if equal_as_text(answer, gold):
            return 1.0
        if _has_base_subscript(gold) or _has_base_subscript(answer) or _differ_in_kind(answer, gold):
            return 0.0
        gold_forms = _parse_reference(gold)
        if not gold_forms:
            return 0.0
        return float(verify(gold_forms, _parse_box(answer), timeout_seconds=0))


def _has_base_subscript(answer: str) -> bool:
    return _BASE_SUBSCRIPT.fullmatch(normalise(answer)) is not None


def _differ_in_kind(answer: str, gold: str) -> bool:
    """Whether one is a set and the other a point or an interval, which math-verify takes for equal."""
    opening = {normalise(text).lstrip("\\")[:1] for text in (answer, gold)}
    return "{" in opening and bool(opening & {"(", "["})
