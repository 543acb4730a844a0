r"""Rewards: how a completion is scored, and the pool of killable processes that does it.

Built in are `match` (text of the last `\boxed{…}`), `math` (math-verify), `custom` (a function of yours) and `judge` (a
language model elsewhere, which needs no process); several can be weighed against each other.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from retrain.errors import PluginError
from retrain.plugins import REGISTRIES, import_path, make_importable
from retrain.rewards.batch import BatchReward, outcome_of
from retrain.rewards.custom import CustomReward
from retrain.rewards.repeats import BOXED
from retrain.rewards.sandbox import RewardPool
from retrain.rewards.weighted import WeightedScore
from retrain.rewards.wire import Item, RewardSpec, TermSpec

if TYPE_CHECKING:
    from retrain.config import schema

__all__ = [
    "BatchReward",
    "Item",
    "Reward",
    "RewardPool",
    "RewardSpec",
    "TermSpec",
    "WeightedScore",
    "build_reward",
    "load_reward",
    "outcome_of",
    "read_spec",
]


JUDGE = "judge"
"""The one reward that waits for somebody else: it scores a batch itself, and no worker process loads it."""


@runtime_checkable
class Reward(Protocol):
    """Says how good a response is. `score` may be `async def`."""

    def score(self, response: str, reference: str) -> float | Awaitable[float]:
        """Return a number, at most a million either way; from `[reward] correct_from` up it is a right answer's."""
        ...


def read_spec(section: schema.Reward, search_paths: Sequence[str] = ()) -> RewardSpec:
    """Turn the `[reward]` table into what a worker builds its reward from."""
    folders = tuple(str(Path(path).expanduser().resolve()) for path in search_paths)
    if section.terms:
        terms = (
            TermSpec(term.type, term.weight, term.custom_module, term.custom_function, section.think_boxes)
            for term in section.terms
        )
        return RewardSpec(tuple(terms), weighted=True, search_paths=folders, correct_from=section.correct_from)
    only = TermSpec(section.type, 1.0, section.custom_module, section.custom_function, section.think_boxes)
    return RewardSpec((only,), search_paths=folders, correct_from=section.correct_from)


def build_reward(
    section: schema.Reward, search_paths: Sequence[str] = (), say: Callable[[str], None] = lambda line: None
) -> BatchReward:
    """Start what scores as `[reward]` says; a reward that cannot be loaded is a PluginError here."""
    spec = read_spec(section, search_paths)
    judged = tuple(term for term in spec.terms if term.type == JUDGE)
    if not judged:
        return _start_pool(spec, section, say)
    from retrain.rewards.judge import JudgeReward  # noqa: PLC0415  (loads an HTTP client, which no worker needs)
    from retrain.rewards.panel import Panel  # noqa: PLC0415

    judge = JudgeReward(section, say)
    if not spec.weighted:
        return judge
    try:
        others = replace(spec, terms=tuple(term for term in spec.terms if term.type != JUDGE))
        pool = _start_pool(others, section, say) if others.terms else None
    except BaseException:
        judge.close()
        raise
    return Panel(judge, judged, pool, section.correct_from)


def _start_pool(spec: RewardSpec, section: schema.Reward, say: Callable[[str], None]) -> RewardPool:
    for name in section.pass_env:
        if "*" not in name and name not in os.environ:
            say(f"Warning: [reward] pass_env names {name}, which is not set")
    return RewardPool(spec, section.timeout_s, section.workers, section.memory_mb, section.pass_env)


def load_reward(term: TermSpec, search_paths: Sequence[str] = ()) -> Reward:
    """Import one reward. Called in a worker: the training process never imports a reward's module.

    A dotted path or entry point may name a class with a `score` method, an object that has one, or a plain function.
    """
    if term.type == "custom":
        if not term.custom_module:
            raise PluginError('a custom reward needs its module.  Try: custom_module = "my_rewards"')
        make_importable(search_paths)
        part = import_path(f"{term.custom_module}:{term.custom_function}", "reward")
    else:
        part = REGISTRIES["reward"].load(term.type, search_paths)
    arguments = (term.think_boxes,) if term.type in BOXED else ()
    try:
        found = part(*arguments) if inspect.isclass(part) else part
    except Exception as error:
        raise PluginError(f"reward {term.name!r} could not be made without arguments: {error!r}") from error
    if isinstance(found, Reward):
        return found
    if callable(found):
        return CustomReward(found)
    raise PluginError(f"reward {term.name!r} is {found!r}: neither a function nor an object with a score method.")
