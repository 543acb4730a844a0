"""Chains of additions and subtractions, one answer each: the task of `retrain demo` as an environment."""

from __future__ import annotations

import random

from retrain.config import schema
from retrain.data import Endless
from retrain.data.arithmetic import draw_split
from retrain.environments import Chat, Log, Outcome
from retrain.environments.args import Args, read_args
from retrain.rewards.match import MatchReward, last_boxed
from retrain.types import Example


class Arithmetic:
    """`13-7-1-5=?`, answered in `\\boxed{}`. Splits other than `train` contain only held-out problems."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        read_args(Args, section)
        self._reward = MatchReward()

    def examples(self, split: str) -> Endless:
        """An unlimited number of problems."""

        def draw(rng: random.Random) -> Example:
            problem = draw_split(rng, held_out=split != "train")
            return Example(problem.question, problem.answer, id=problem.question)

        return Endless(draw)

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Ask once; the reward is 1 for the correct number in a box."""
        assert isinstance(example.prompt, str)
        reply = await chat.ask(example.prompt)
        right = float(self._reward.score(reply.text, example.reference))
        return Outcome(right, {"boxed": float(bool(last_boxed(reply.text)))})
