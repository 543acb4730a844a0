"""Run by test_reasoning_gym.py in a virtual environment that has the package: plain asserts, no pytest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.config import load_config
from retrain.config.schema import Environment as Section
from retrain.environments import Outcome, Reply, load_split
from retrain.environments.reasoning_gym import MINIMAL_SCORE, ReasoningGym, load
from retrain.errors import ConfigError
from retrain.types import Example

ROOT = Path(__file__).parents[2]
NO_REFERENCE = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
RAISES = "prime_factorization"
GIVES_CRUMBS = ("color_cube_rotation", "countdown", "emoji_mystery")


class OneAnswer:
    """A chat that says one thing."""

    seed = 0

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[Any] = []

    async def ask(self, new: Any, tools: Any = ()) -> Reply:
        self.asked.append(new)
        return Reply(self.text)

    async def reply_to(self, history: Any, tools: Any = ()) -> Reply:
        return await self.ask(history, tools)


def build(id: str, logged: list[str] | None = None, **args: Any) -> ReasoningGym:
    lines = [] if logged is None else logged
    return load(Section(provider="reasoning_gym", id=id, args={"size": 20, "held_out": 5, **args}), lines.append)


def answer(gym: ReasoningGym, example: Example, text: str) -> Outcome:
    return asyncio.run(gym.rollout(example, OneAnswer(f"I think <answer>{text}</answer>")))


def a_right_answer_is_one_and_nonsense_nothing() -> None:
    gym = build("chain_sum")
    example = load_split(gym, Section(provider="reasoning_gym", id="chain_sum"), "train")[0]
    assert answer(gym, example, example.reference) == Outcome(1.0, {"answered": 1.0, "scorer_raised": 0.0})
    assert answer(gym, example, "zzz").reward == 0.0
    untagged = asyncio.run(gym.rollout(example, OneAnswer(example.reference)))
    assert untagged == Outcome(0.0, {"answered": 0.0, "scorer_raised": 0.0})
    assert [message["role"] for message in example.prompt] == ["system", "user"]  # type: ignore[index]


def problems_are_the_same_each_time_and_splits_do_not_meet() -> None:
    one, other = build("chain_sum"), build("chain_sum")
    assert [e.prompt for e in one.examples("train")] == [e.prompt for e in other.examples("train")]
    train, test = ({e.id for e in one.examples(split)} for split in ("train", "test"))
    assert (len(train), len(test)) == (20, 5) and not train & test
    assert build("chain_sum", seed=7).examples("train")[0].prompt != one.examples("train")[0].prompt


def a_scorer_that_raises_has_seen_a_wrong_answer() -> None:
    gym = build(RAISES)
    outcome = answer(gym, gym.examples("train")[0], "zzz")
    assert outcome.reward == 0.0 and outcome.metrics["scorer_raised"] == 1.0


def crumbs_are_no_reward() -> None:
    for task in GIVES_CRUMBS:
        gym = build(task)
        example = gym.examples("train")[0]
        raw = gym._dataset.score_answer("zzz", gym.entry(0))
        assert 0 < raw <= MINIMAL_SCORE, (task, raw)
        assert answer(gym, example, "zzz").reward == 0.0
        assert answer(gym, example, example.reference).reward == 1.0


def tasks_without_a_reference_are_scored_by_playing() -> None:
    for task in NO_REFERENCE:
        gym = build(task)
        example = gym.examples("train")[0]
        assert example.reference == "", task
        assert answer(gym, example, "zzz").reward < 0.5, task
    gym = build("graph_color")
    entry = gym.entry(0)
    colours = solve_colouring(entry["metadata"]["puzzle"])
    assert answer(gym, gym.examples("train")[0], str(colours).replace("'", '"')).reward == 1.0


def solve_colouring(puzzle: dict[str, Any]) -> dict[str, int]:
    colours: dict[str, int] = {}

    def place(at: int) -> bool:
        if at == len(puzzle["vertices"]):
            return True
        vertex = puzzle["vertices"][at]
        near = {b if a == vertex else a for a, b in puzzle["edges"] if vertex in (a, b)}
        for colour in puzzle["color_options"]:
            if all(colours.get(str(n)) != colour for n in near):
                colours[str(vertex)] = colour
                if place(at + 1):
                    return True
                del colours[str(vertex)]
        return False

    assert place(0)
    return colours


def partial_credit_can_be_disabled() -> None:
    gym = build("chain_sum", partial=False)
    assert gym._reward(0.99) == 0.0 and gym._reward(1.0) == 1.0
    assert build("chain_sum")._reward(0.5) == 0.5


def tasks_are_mixed_by_weight() -> None:
    tasks = {"chain_sum": {"weight": 9.0, "config": {"max_terms": 2}}, "leg_counting": {}}
    gym = build("composite", tasks=tasks, size=200)
    names = [example.meta["task"] for example in gym.examples("train")]
    assert 150 < names.count("chain_sum") < 200 and set(names) == set(tasks)
    for example in gym.examples("train")[:10]:
        assert answer(gym, example, example.reference).reward == 1.0


def a_task_that_rewards_nonsense_is_named() -> None:
    logged: list[str] = []
    build("game_of_life_halting", logged)
    build("chain_sum", quiet := [])
    assert any("rewards nonsense" in line for line in logged), logged
    assert quiet == []


def the_example_loads() -> None:
    section = load_config(ROOT / "examples" / "reasoning_gym.toml").environment
    assert len(load_split(load(section, print), section, "train")) == 5000


def what_cannot_be_had_is_rejected() -> None:
    rejects("chain_sums", r"'chain_sums'.*Did you mean chain_sum")
    rejects("chain_sum", r"args.sice is unknown.*Did you mean size", sice=5)
    rejects("chain_sum", r"rejected the settings of 'chain_sum'.*no_such", config={"no_such": 1})
    rejects("chain_sum", r"rejected the settings", config={"min_terms": 9, "max_terms": 2})
    rejects("chain_sum", r"args.size is not valid", size="10")
    rejects("chain_sum", r'args.tasks is set, but id is "chain_sum"', tasks={"leg_counting": {}})
    rejects("composite", r"needs args.tasks")
    rejects("composite", r"'legs'", tasks={"legs": {}})
    rejects("composite", r"weight is not valid", tasks={"leg_counting": {"weight": -1.0}})
    rejects("chain_sum", r"args.prompt = 'polite' is unknown", prompt="polite")


def rejects(id: str, pattern: str, **args: Any) -> None:
    try:
        build(id, **args)
    except ConfigError as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"{id} {args} was accepted")


CHECKS: tuple[Callable[[], None], ...] = (
    a_right_answer_is_one_and_nonsense_nothing,
    problems_are_the_same_each_time_and_splits_do_not_meet,
    a_scorer_that_raises_has_seen_a_wrong_answer,
    crumbs_are_no_reward,
    tasks_without_a_reference_are_scored_by_playing,
    partial_credit_can_be_disabled,
    tasks_are_mixed_by_weight,
    a_task_that_rewards_nonsense_is_named,
    the_example_loads,
    what_cannot_be_had_is_rejected,
)

for check in CHECKS:
    check()
    print(check.__name__.replace("_", " "))
print("all is well")
