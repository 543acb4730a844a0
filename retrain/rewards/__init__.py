r"""Rewards: scoring of completions, in a pool of worker processes.

Built in are `match` (text of the last `\boxed{…}`), `math` (equality), `custom` (your function) and `judge` (an LLM
judge, which needs no worker); several can be combined in a weighted sum.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retrain.errors import PluginError
from retrain.plugins import REGISTRIES, import_path, make_importable
from retrain.rewards.batch import BatchReward, outcome_of
from retrain.rewards.custom import CustomReward
from retrain.rewards.weighted import WeightedScore
from retrain.rewards.wire import Item, RewardSpec, TermSpec

if TYPE_CHECKING:
    from retrain.config import schema
    from retrain.rewards.sandbox import RewardPool

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
    "start_pool",
]


def __getattr__(name: str) -> Any:
    if name != "RewardPool":
        raise AttributeError(f"module 'retrain.rewards' has no attribute {name!r}")
    # A worker process imports this package, and not the pool that starts workers.
    return importlib.import_module("retrain.rewards.sandbox").RewardPool


JUDGE = "judge"
"""The LLM judge scores a batch over HTTP; no worker process loads it."""


@runtime_checkable
class Reward(Protocol):
    """Scores a response. `score` may be `async def`."""

    def score(self, response: str, reference: str) -> float | Awaitable[float]:
        """Return a number within ±1,000,000; it counts as correct if it is at least `[reward] correct_from`."""


def read_spec(section: schema.Reward, search_paths: Sequence[str] = ()) -> RewardSpec:
    """Convert the `[reward]` table to the spec from which workers build the reward."""
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
    section: schema.Reward, search_paths: Sequence[str] = (), log: Callable[[str], None] = lambda line: None
) -> BatchReward:
    """Start the reward of the `[reward]` table; raises PluginError if it cannot be loaded."""
    spec = read_spec(section, search_paths)
    judge_terms = tuple(term for term in spec.terms if term.type == JUDGE)
    if not judge_terms:
        return start_pool(spec, section, log)
    from retrain.rewards.judge import JudgeReward  # noqa: PLC0415  (loads an HTTP client)
    from retrain.rewards.mixed import MixedReward  # noqa: PLC0415

    judge = JudgeReward(section, log)
    if not spec.weighted:
        return judge
    try:
        others = replace(spec, terms=tuple(term for term in spec.terms if term.type != JUDGE))
        pool = start_pool(others, section, log) if others.terms else None
    except BaseException:
        judge.close()
        raise
    return MixedReward(judge, judge_terms, pool, section.correct_from)


def start_pool(spec: RewardSpec, section: schema.Reward, log: Callable[[str], None]) -> RewardPool:
    """Start worker processes, which load the rewards of `spec`; raises PluginError if they cannot."""
    for name in section.pass_env:
        if "*" not in name and name not in os.environ:
            log(f"Warning: [reward] pass_env lists {name}, which is not set")
    from retrain.rewards.sandbox import RewardPool  # noqa: PLC0415  (a worker process does not need it)

    return RewardPool(spec, section.timeout_s, section.workers, section.memory_mb, section.pass_env, log)


def load_reward(term: TermSpec, search_paths: Sequence[str] = ()) -> Reward:
    """Import one reward. Called in a worker: the training process never imports a reward's module.

    A dotted path or entry point may name a class with a `score` method, an object that has one, or a plain function.
    """
    if term.type == "custom":
        if not term.custom_module:
            raise PluginError('a custom reward needs a module.  Try: custom_module = "my_rewards"')
        make_importable(search_paths)
        part = import_path(f"{term.custom_module}:{term.custom_function}", "reward")
    else:
        part = REGISTRIES["reward"].load(term.type, search_paths)
    arguments = (term.think_boxes,) if term.reads_box else ()
    try:
        found = part(*arguments) if inspect.isclass(part) else part
    except Exception as error:
        raise PluginError(f"reward {term.name!r} could not be instantiated without arguments: {error!r}") from error
    if isinstance(found, Reward):
        return found
    if callable(found):
        return CustomReward(found)
    raise PluginError(f"reward {term.name!r} is {found!r}: neither a function nor an object with a score method.")
