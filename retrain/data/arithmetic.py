"""The `arithmetic` source: chains of additions and subtractions such as `13-7-1-5=?`.

Endless, and seeded by the generator of the caller. A hash of the question decides which tenth is held out, so that no
seed and no process draws a held-out problem for training.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.data.order import Endless
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

LARGEST_RESULT = 20
LARGEST_OPERAND = 9
# Weights of problems with 3, 4 and 5 operands: prompts differ in length, and the longest are the rarest.
OPERAND_COUNTS = (3, 4, 5)
OPERAND_WEIGHTS = (45, 35, 20)
HELD_OUT_ONE_IN = 10

_TERM = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Problem:
    """A question as in the user message, and the integer that answers it."""

    question: str
    answer: str


def read_terms(question: str) -> list[int]:
    """Return the signed terms of a question: `13-7+1=?` gives 13, -7, 1."""
    return [int(term) for term in _TERM.findall(question)]


def draw_problem(rng: random.Random) -> Problem:
    """Draw a problem whose partial results all lie in 0..LARGEST_RESULT."""
    (operand_count,) = rng.choices(OPERAND_COUNTS, OPERAND_WEIGHTS)
    total = rng.randint(1, LARGEST_RESULT)
    text = str(total)
    for _ in range(operand_count - 1):
        lowest, highest = max(-LARGEST_OPERAND, -total), min(LARGEST_OPERAND, LARGEST_RESULT - total)
        term = rng.choice([term for term in range(lowest, highest + 1) if term != 0])
        total += term
        text += f"{term:+d}"
    return Problem(question=f"{text}=?", answer=str(total))


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out tenth, from its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def draw_split(rng: random.Random, held_out: bool) -> Problem:
    """Draw problems until one belongs to the requested side of the split."""
    while True:
        problem = draw_problem(rng)
        if is_held_out(problem.question) == held_out:
            return problem


class ArithmeticSource:
    """Endless problems. Split `train` never draws a held-out problem; every other split draws only those."""

    def __init__(self, section: schema.Data) -> None:
        self._section = section

    def load(self) -> Endless:
        """Return the problems; the consumer's seed decides which ones are drawn."""
        return Endless(self._draw)

    def _draw(self, rng: random.Random) -> Example:
        problem = draw_split(rng, held_out=self._section.split != "train")
        return Example(problem.question, problem.answer, id=problem.question)
