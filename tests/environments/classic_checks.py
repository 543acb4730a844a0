"""The bridge to verifiers before 0.4. Run by tests/real in a virtual environment that has such a one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.config.schema import Environment
from retrain.environments import build_environment, load_split
from retrain.environments.runner import RolloutScore
from retrain.errors import ConfigError, PluginError, RolloutError
from tests.environments.table import TextEngine, play

PACKAGES = Path(__file__).parent / "packages"
pytestmark = pytest.mark.filterwarnings("ignore")


def build(id: str, generation: str = "classic", logged: list[str] | None = None, **options: Any) -> Any:
    section = Environment(provider="verifiers", id=id, **options)
    return build_environment(section, [str(PACKAGES / generation)], (logged if logged is not None else []).append)


def test_a_multi_turn_environment_runs_its_own_loop() -> None:
    engine = TextEngine(lambda _: "\\boxed{5}")
    groups = play(build("primeintellect/wordle", max_turns=3), engine, n=3, count=4)
    for group in groups:
        won = group.example.reference == "5"
        for score in group.scores_G:
            assert isinstance(score, RolloutScore)
            assert (score.value, score.turns, score.forks) == (float(won), 1 if won else 3, 0)
            assert score.truncated is not won
            assert score.metrics["won"] == float(won)
    assert engine.sizes[0] == 12 and len(engine.sizes) == 3


def test_a_full_context_ends_the_rollout_and_it_is_scored() -> None:
    (group,) = play(build("wordle"), lambda _: "1+1=2. " * 3 + "\\boxed{99}", n=2, count=1, context=80)
    for score in group.scores_G:
        assert isinstance(score, RolloutScore)
        assert (score.value, score.truncated) == (0.0, True)


def test_tools_reach_the_model_and_are_run_by_the_environment() -> None:
    def answer(prompt: str) -> str:
        if "Observed" in prompt:
            return "7"
        return '<tool_call>{"name": "add", "arguments": {"first": 3, "second": 4}}</tool_call>'

    (group,) = play(build("adder"), answer, n=2, count=1, max_tokens=200)
    assert [score.value for score in group.scores_G] == [1.0, 1.0]
    assert [m["role"] for m in group.completions_G[0].transcript] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("when", "detail"), [("scoring", "no rule"), ("setup", "no board"), ("nan", "a reward of nan")]
)
def test_a_rollout_that_fails_says_where(when: str, detail: str) -> None:
    with pytest.raises(RolloutError, match=f"failed for 2 of 2 rollouts .*{detail}"):
        play(build("troubled", args={"when": when}), lambda _: "2", n=2, count=1)


def test_what_cannot_be_used_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r'needs verifiers 0.4 or later.*pip install "verifiers>=0.4"'):
        build("no_exports", "v1")
    with pytest.raises(ConfigError, match=r"has 'wen', which the environment does not take.  Did you mean 'when'"):
        build("troubled", args={"wen": "x"})
    with pytest.raises(ConfigError, match="scores the rollouts of a group together"):
        build("troubled", args={"when": "group"})
    with pytest.raises(PluginError, match="could not be set up: OSError: disk gone"):
        build("troubled", args={"when": "load"})
    section = Environment(provider="verifiers", id="troubled")
    with pytest.raises(ConfigError, match=r"no rows to train on.*primeintellect/wordle"):
        load_split(build("troubled", args={"when": "evaluation only"}), section, "train")


def test_the_training_split_is_what_is_trained_on_anyway() -> None:
    environment = build("wordle", args={"split": "train"})
    assert len(environment.examples("train")) == 40
    assert environment.examples("test") == []
