"""Reward functions as TRL calls them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from retrain.errors import ConfigError, PluginError
from retrain.grpo.rewards import ScriptReward, describe_terms, read_terms
from retrain.rewards import Item, WeightedScore


def items(count: int = 3, **columns: Sequence[Any]) -> list[Item]:
    meta = [{name: values[at] for name, values in columns.items()} for at in range(count)]
    return [Item("x" * (at + 1), "", "say x", meta[at], np.arange(at + 1)) for at in range(count)]


def score(functions: Any, given: Sequence[Item], weights: list[float] | None = None, state: Any = None) -> Any:
    with ScriptReward(read_terms(functions, weights), state, lambda line: None) as reward:
        return reward.score(given)


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def odd_only(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 if len(text) % 2 else None for text in completions]


def test_rewards_are_weighed_and_each_is_a_metric() -> None:
    terms = read_terms([lengths, odd_only], [0.5, 10.0])
    scores = score([lengths, odd_only], items(), [0.5, 10.0])
    assert [found.value for found in scores] == [10.5, 1.0, 11.5]
    assert [found.terms for found in scores] == [
        {"lengths": 1.0, "odd_only": 1.0},
        {"lengths": 2.0},
        {"lengths": 3.0, "odd_only": 1.0},
    ]
    metrics = describe_terms(terms, scores)
    assert metrics["rewards/lengths/mean"] == 2.0 and metrics["rewards/lengths/std"] == 1.0
    assert metrics["rewards/odd_only/mean"] == 1.0


def test_a_function_sees_prompts_completions_ids_columns_and_state() -> None:
    seen: dict[str, Any] = {}

    def watch(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, level: Any, **rest: Any) -> Any:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, state=trainer_state, level=level)
        seen["rest"] = sorted(rest)
        return [0.0] * len(completions)

    score(watch, items(level=["a", "b", "c"], other=[1, 2, 3]), state="state")
    assert seen == {
        "prompts": ["say x"] * 3,
        "completions": ["x", "xx", "xxx"],
        "ids": [[0], [0, 1], [0, 1, 2]],
        "state": "state",
        "level": ["a", "b", "c"],
        "rest": ["log_metric", "other"],
    }


def test_a_conversation_is_answered_by_messages() -> None:
    seen: list[Any] = []

    def watch(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0]

    score(watch, [Item("4", "", ({"role": "user", "content": "2 + 2"},))])
    assert seen == [[[{"role": "user", "content": "2 + 2"}]], [[{"role": "assistant", "content": "4"}]]]


def test_an_async_function_is_waited_for() -> None:
    async def later(completions: Any, **columns: Any) -> list[float]:
        return lengths(completions)

    assert [found.value for found in score(later, items())] == [1.0, 2.0, 3.0]


def test_an_async_function_is_waited_for_under_a_loop_that_runs() -> None:
    async def later(completions: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return lengths(completions)

    async def notebook() -> Any:
        return score(later, items())

    assert [found.value for found in asyncio.run(notebook())] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", [tuple, np.asarray, torch.tensor])
def test_arrays_are_lists_of_numbers(kind: Any) -> None:
    assert [found.value for found in score(lambda completions, **columns: kind([1.0, 2.0, 3.0]), items())] == [
        1.0,
        2.0,
        3.0,
    ]


def test_a_function_may_apply_to_none_where_another_applies() -> None:
    def nothing(completions: Any, **columns: Any) -> list[None]:
        return [None] * len(completions)

    scores = score([nothing, lengths], items())
    assert [(found.counts, found.value) for found in scores] == [(True, 1.0), (True, 2.0), (True, 3.0)]


def test_a_completion_that_no_reward_applies_to_is_left_out() -> None:
    scores = score(odd_only, items())
    assert [found.counts for found in scores] == [True, False, True]
    assert "returned None" in scores[1].detail
    assert [found.failed for found in scores] == [False] * 3


def test_functions_can_log_numbers_of_their_own() -> None:
    def noting(completions: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("longest", max(map(len, completions)))
        return lengths(completions)

    with ScriptReward(read_terms(noting, None), None, lambda line: None) as reward:
        reward.score(items())
        assert reward.metrics() == {"longest": 3.0}
        assert reward.metrics() == {}


def test_a_reward_by_name_compares_with_the_answer() -> None:
    given = [Item(r"\boxed{5}", "5", "2 + 3"), Item(r"\boxed{6}", "5", "2 + 3")]
    scores = score(["match", lengths], given, [1.0, 0.0])
    assert [found.value for found in scores] == [1.0, 0.0]
    assert all(isinstance(found, WeightedScore) for found in scores)


def _raises(completions: Any, **columns: Any) -> list[float]:
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_raises, "the reward function '_raises' raised KeyError.'answer'. on a batch of 3 completions"),
        (lambda completions, **columns: [1.0], "returned 1 rewards for 3 completions"),
        (lambda completions, **columns: 1.0, "returned float; it must return a list"),
        (lambda completions, **columns: {1: 1.0, 2: 1.0, 3: 1.0}, "returned dict; it must return a list"),
        (lambda completions, **columns: {1.0, 2.0, 3.0}, "returned set; it must return a list"),
        (lambda completions, **columns: np.float32(1.0), "returned float32; it must return a list"),
        (lambda completions, **columns: torch.tensor(1.0), "returned Tensor; it must return a list"),
        (lambda completions, **columns: ["good"] * 3, "returned 'good' at completion 0"),
        (lambda completions, **columns: [float("nan")] * 3, "must be finite"),
        (lambda completions, **columns: [1e9] * 3, "must be between"),
        (lambda prompts: [1.0] * 3, "raised TypeError"),
    ],
)
def test_a_function_that_fails_is_named(function: Any, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        score(function, items())


class Weigher:
    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        return lengths(completions)


def test_terms_are_named_after_their_functions() -> None:
    named = read_terms([lengths, functools.partial(lengths), Weigher(), lambda completions: [], "math"], None)
    assert [term.name for term in named] == ["lengths", "lengths#2", "Weigher", "<lambda>", "math"]
    assert named[0].as_option() == {
        "type": "custom",
        "weight": 1.0,
        "custom_module": __name__,
        "custom_function": "lengths",
    }
    assert named[-1].as_option() == {"type": "math", "weight": 1.0}


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], []])
def test_weights_are_as_many_as_the_rewards(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match=rf"reward_weights has {len(weights)} weights for 2 reward functions"):
        read_terms([lengths, odd_only], weights)


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([], "reward_funcs is empty"),
        (None, "NoneType"),
        ([3], "a function f"),
        ("maths", "Did you mean 'math'"),
        (lambda completions, log_extra: [], "log_extra"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(rewards: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_terms(rewards, None)
