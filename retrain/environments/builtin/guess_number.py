r"""Guess a number within a few tries; after each guess a hint says higher or lower.

The messages are symbols that the built-in model can read (`1..9?`, then `5+?` for higher and `5-?` for lower), or
sentences for larger models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pydantic import Field

from retrain.config import schema
from retrain.environments import Chat, Log, Outcome, Reply
from retrain.environments.args import Args, read_args
from retrain.types import Example

_GUESS = re.compile(r"\\boxed\{\s*(\d{1,6})\s*\}")


class GuessArgs(Args):
    """The `[environment] args`."""

    top: int = Field(9, ge=2, le=999)
    """The number is between 1 and `top`."""
    tries: int = Field(4, ge=1, le=100)
    """Number of tries; a reply without a guess counts as one."""
    style: Literal["signs", "words"] = "signs"
    """Symbols or sentences."""


class GuessNumber:
    r"""One guess in `\boxed{}` per reply; the reward is 1 for finding the number, else 0."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        self.args = read_args(GuessArgs, section)

    def examples(self, split: str) -> list[Example]:
        """Every number once, the same in all splits: what is learned is the strategy."""
        start = self._start()
        return [
            Example(start, str(number), id=f"1..{self.args.top}:{number}") for number in range(1, self.args.top + 1)
        ]

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Continue until the number is found or no tries are left."""
        secret, message = int(example.reference), self._start()
        guesses: list[int] = []
        tries = 0
        while tries < self.args.tries and secret not in guesses:
            reply = await chat.ask(message)
            tries += 1
            guess = read_guess(reply)
            guesses += [] if guess is None else [guess]
            message = self._hint(guess, secret)
        return Outcome(
            float(secret in guesses), {"tries": tries, "guesses": len(guesses) / tries, **hint_metrics(guesses, secret)}
        )

    def _start(self) -> str:
        if self.args.style == "signs":
            return f"1..{self.args.top}?"
        return (
            f"I am thinking of a whole number from 1 to {self.args.top}. You have {self.args.tries} tries. "
            r"Write one guess as \boxed{number}; I will say whether my number is higher or lower."
        )

    def _hint(self, guess: int | None, secret: int) -> str:
        if guess is None:
            return "?" if self.args.style == "signs" else r"I see no guess. Write one as \boxed{number}."
        if self.args.style == "signs":
            return f"{guess}+?" if secret > guess else f"{guess}-?"
        return f"My number is {'higher' if secret > guess else 'lower'} than {guess}."


def hint_metrics(guesses: Sequence[int], secret: int) -> dict[str, float]:
    """The share of guesses that follow the previous hint; empty when there was no hint."""
    followed = [(after > before) == (secret > before) and after != before for before, after in pairwise(guesses)]
    return {"heeded": sum(followed) / len(followed)} if followed else {}


def read_guess(reply: Reply) -> int | None:
    """The number in the only box of a complete reply.

    Without both conditions, writing boxes until the token limit would be rewarded.
    """
    found = _GUESS.findall(reply.text)
    return int(found[0]) if len(found) == 1 and not reply.cut else None
