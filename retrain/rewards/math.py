r"""The `math` reward: compares the last `\boxed{…}` of the response with the reference as mathematics.

Both answers are parsed and compared by `retrain.rewards.answers`: as text, as exact numbers, and numerically at several
points to 120 digits, all at a bounded cost. What it cannot parse goes to math-verify, whose time limits need a signal
in the main thread; they are off here, and the worker process is killed when it takes too long.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from math_verify import parse, verify

from retrain.rewards.answers.compare import equal_answers
from retrain.rewards.answers.notation import tidy
from retrain.rewards.answers.parse import read
from retrain.rewards.match import answer_of, equal_as_text, final_answer

# The longest answer of the MATH training set has 135 characters; symbolic work on much longer ones is not worthwhile.
LONGEST_ANSWER = 1000
_LONGEST_SYMBOLIC = 200
_KEPT = 16_384

# Notation for math-verify: not parsed here, and without parts that it would ignore.
_CALCULUS = re.compile(
    r"\\(?:int|sum|prod|lim|det|cap|setminus|cot|operatorname|begin\{cases\}|max|min|gcd|lcm)(?![A-Za-z])"
)
_DROPPED = re.compile(r"\\approx|\\text|\\mbox|\\equiv|\\pmod|\\sim|(?<![A-Za-z\\])[A-Za-z]{4,}|=.*=|[0-9)]_\{?\d")
# Expressions whose evaluation may explode.
_EXPLOSIVE = re.compile(r"!|\^\s*\{?\s*(?:\d{4,}|[^{}]*\^)|\d{12,}|\\binom")


class MathReward:
    """1.0 if the answer equals the reference, else 0.0."""

    def __init__(self, think_boxes: bool = True) -> None:
        self._think_boxes = think_boxes
        # It warns at every start that its time limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # The first parse builds the grammar, which must not count against the first item's time limit.
        _parse_box("1")

    def score(self, response: str, reference: str) -> float:
        """Compare the response's last box with the reference's answer."""
        return float(equal_mathematics(final_answer(response, self._think_boxes), answer_of(reference)))


@lru_cache(maxsize=_KEPT)
def equal_mathematics(answer: str, gold: str) -> bool:
    """Whether two answers are equal; an empty or very long one equals nothing."""
    if not answer or len(answer) > LONGEST_ANSWER or len(gold) > LONGEST_ANSWER:
        return answer != "" and answer == gold
    if equal_as_text(answer, gold):
        return True
    found, wanted = read(answer), read(gold)
    if found is not None and wanted is not None:
        return equal_answers(found, wanted)
    return _suits_math_verify(tidy(answer), tidy(gold)) and bool(
        verify(_parse_box(gold), _parse_box(answer), timeout_seconds=0)
    )


def _suits_math_verify(*answers: str) -> bool:
    """Whether math-verify can compare these answers reliably and at a bounded cost."""
    return any(map(_CALCULUS.search, answers)) and all(
        len(text) <= _LONGEST_SYMBOLIC
        and text.count("{") == text.count("}")
        and not _DROPPED.search(text)
        and not _EXPLOSIVE.search(text)
        for text in answers
    )


@lru_cache(maxsize=1024)
def _parse_box(answer: str) -> list[object]:
    parsed: list[object] = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    return parsed
