"""Reward functions as TRL calls them: `f(prompts, completions, **columns) -> list[float | None]`, in this process.

A whole batch is scored in one call. None says that a function does not apply to a completion. A name in place of a
function is one of retrain's own rewards, which compares with the answer column and runs in its pool of processes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrain.config.schema import Reward as RewardSection
from retrain.errors import ConfigError, PluginError
from retrain.plugins import REGISTRIES
from retrain.rewards import BatchReward, Item, WeightedScore, build_reward, outcome_of
from retrain.rewards.custom import check_bounds
from retrain.rewards.weighted import distinct_names
from retrain.types import Score, StepMetrics

RewardFunction = Callable[..., Any]
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")
"""What every function is given beside the columns, under these names."""


@dataclass(frozen=True)
class Term:
    """One reward: a function, or the name of one of retrain's."""

    name: str
    weight: float
    function: RewardFunction | None = None

    def as_option(self) -> dict[str, Any]:
        """The term as `[[reward.terms]]` has it."""
        if self.function is None:
            return {"type": self.name, "weight": self.weight}
        module = str(inspect.unwrap(self.function).__module__)
        return {"type": "custom", "weight": self.weight, "custom_module": module, "custom_function": self.name}


def read_terms(rewards: object, weights: Sequence[float] | None) -> list[Term]:
    """Each reward with its weight, checked."""
    given: list[Any] = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if not given:
        raise ConfigError("reward_funcs is empty.  Try: a function f(prompts, completions, **columns), or 'math'")
    if weights is not None and len(weights) != len(given):
        raise ConfigError(
            f"reward_weights has {len(weights)} weights for {len(given)} reward functions.  "
            f"Try: reward_weights={[1.0] * len(given)}"
        )
    names = distinct_names([_name(reward) for reward in given])
    values = [float(weight) for weight in weights or [1.0] * len(given)]
    return [
        Term(name, weight, None if isinstance(reward, str) else reward)
        for name, weight, reward in zip(names, values, given, strict=True)
    ]


def _name(reward: object) -> str:
    if isinstance(reward, str):
        problem = REGISTRIES["reward"].explain_unknown(reward)
        if problem:
            raise ConfigError(f"reward_funcs: {problem}  A reward model of the hub is not a reward here.")
        return reward
    if not callable(reward):
        raise ConfigError(
            f"reward_funcs holds {reward!r} ({type(reward).__name__}).  "
            "Try: a function f(prompts, completions, **columns), or the name of a reward such as 'math'"
        )
    _refuse_unknown_wish(reward)
    inner: Any = reward.func if isinstance(reward, functools.partial) else reward
    try:
        return str(inner.__name__)
    except AttributeError:  # an object with a __call__
        return type(inner).__name__


def _refuse_unknown_wish(reward: Callable[..., Any]) -> None:
    """TRL also gives `log_extra` and `environments`; a function that cannot do without them cannot be used."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # written in C, without a signature
        return
    for name in ("log_extra", "environments"):
        if name in parameters and parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(f"the reward function {reward!r} wants {name!r}, which is not given here.")


class ScriptReward(BatchReward):
    """The weighted sum of several rewards. `state` is what functions are given as `trainer_state`."""

    def __init__(self, terms: Sequence[Term], state: object, say: Callable[[str], None]) -> None:
        self.terms = terms
        self.state = state
        self.pools: dict[str, BatchReward] = {}
        self.logged: dict[str, list[float]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        for term in terms:
            if term.function is None:
                kind = term.name.partition("#")[0]
                self.pools[term.name] = build_reward(RewardSection(type=kind), log=say)

    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        """Score every item, in order; a function that fails for a batch ends the run."""
        whole = [Item(*item) for item in items]
        rows: list[dict[str, Score | None]] = [{} for _ in whole]
        for term in self.terms:
            scores = self.pools[term.name].score(whole) if term.function is None else self._call(term, whole)
            for row, score in zip(rows, scores, strict=True):
                row[term.name] = score
        return [self._add_up(row) for row in rows]

    def _add_up(self, row: Mapping[str, Score | None]) -> Score:
        applying = {name: score for name, score in row.items() if score is not None and score.outcome != "none"}
        failed = next((score for score in applying.values() if not score.counts), None)
        if failed is not None:
            return failed
        if not applying:
            return Score(0.0, "none", "no reward applies to this completion: all of them returned None")
        total = sum(term.weight * applying[term.name].value for term in self.terms if term.name in applying)
        total = check_bounds(total, "the weighted rewards add up to")
        values = {name: score.value for name, score in applying.items()}
        return WeightedScore(total, outcome_of(total), terms=values)

    def _call(self, term: Term, items: Sequence[Item]) -> list[Score | None]:
        assert term.function is not None
        columns = {name: [item.meta[name] for item in items] for name in (items[0].meta if items else ())}
        given: dict[str, Any] = {
            "prompts": [item.prompt if isinstance(item.prompt, str) else list(item.prompt) for item in items],
            "completions": [_completion(item) for item in items],
            "completion_ids": [[] if item.token_ids is None else item.token_ids.tolist() for item in items],
            "trainer_state": self.state,
            "log_metric": self._log_metric,
        }
        who = f"the reward function {term.name!r}"
        try:
            result = term.function(**columns, **given)
            if inspect.isawaitable(result):
                result = self._wait(result)
        except Exception as error:
            raise PluginError(f"{who} raised {error!r} on a batch of {len(items)} completions.") from error
        kind = type(result).__name__
        if isinstance(result, np.ndarray | torch.Tensor):
            result = result.tolist()
        if isinstance(result, str | bytes) or not isinstance(result, Sequence):
            raise PluginError(f"{who} returned {kind}; it must return a list of numbers.")
        if len(result) != len(items):
            raise PluginError(f"{who} returned {len(result)} rewards for {len(items)} completions.")
        return [_to_score(who, at, value) for at, value in enumerate(result)]

    def _log_metric(self, name: str, value: float) -> None:
        self.logged.setdefault(name, []).append(float(value))

    def _wait(self, result: Any) -> Any:
        # One loop for the run, so that an HTTP client kept between calls stays usable.
        self.loop = self.loop or asyncio.new_event_loop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self.loop.run_until_complete(_wait_for(result))
        # In a notebook, say: a thread runs one loop at a time, so ours takes another thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.loop.run_until_complete, _wait_for(result)).result()

    def metrics(self) -> StepMetrics:
        """What functions logged themselves, and what the pools cost, since this was last asked."""
        found: StepMetrics = {name: sum(values) / len(values) for name, values in self.logged.items()}
        self.logged.clear()
        for pool in self.pools.values():
            found |= pool.metrics()
        return found

    def close(self) -> None:
        """End the pools."""
        for pool in self.pools.values():
            pool.close()
        if self.loop is not None:
            self.loop.close()
            self.loop = None


async def _wait_for(result: Any) -> Any:
    return await result


def _completion(item: Item) -> str | list[dict[str, str]]:
    """A conversation is answered by a message, a text by a text."""
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


def _to_score(who: str, at: int, value: Any) -> Score | None:
    if value is None:
        return None
    try:
        number = check_bounds(float(value), f"{who} returned, at completion {at},")
    except (TypeError, ValueError) as error:
        raise PluginError(f"{who} returned {value!r} at completion {at}: {error}.") from error
    return Score(number, outcome_of(number))


def describe_terms(terms: Sequence[Term], scores: Sequence[Score]) -> StepMetrics:
    """Mean and spread of each reward over the completions that it applies to, under TRL's names."""
    metrics: StepMetrics = {}
    for term in terms:
        values = [s.terms[term.name] for s in scores if isinstance(s, WeightedScore) and term.name in s.terms]
        if values:
            mean = sum(values) / len(values)
            metrics[f"rewards/{term.name}/mean"] = mean
            spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
            metrics[f"rewards/{term.name}/std"] = spread**0.5
    return metrics
