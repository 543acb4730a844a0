"""The environments that come along, played by a script, by a searcher, and against bad arguments."""

from __future__ import annotations

import asyncio
import json
import re
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import TrainConfig, build_config
from retrain.config.schema import Environment as Section
from retrain.data.arithmetic import is_held_out
from retrain.environments import Environment, Outcome, Reply, build_environment, load_split
from retrain.environments.builtin.calculator import calculate
from retrain.environments.builtin.guess_number import hint_metrics, read_guess
from retrain.environments.tasks import EnvironmentTasks
from retrain.errors import ConfigError
from retrain.storage.recording import read_recordings
from retrain.testing import ScriptedChat
from retrain.tracking.console import Console
from retrain.trainer import train
from retrain.types import Completion, Example
from tests.environments.table import play, tiny_tokenizer


def build(id: str, **args: Any) -> Environment:
    return build_environment(Section(provider="builtin", id=id, args=args), (), lambda _: None)


def script(environment: Environment, example: Example, *answers: str) -> tuple[Outcome, list[str]]:
    chat = ScriptedChat(answers)
    outcome = asyncio.run(environment.rollout(example, chat))
    return outcome, [message["content"] for message in chat.transcript if message["role"] != "assistant"]


def test_arithmetic_asks_once_and_reads_the_box() -> None:
    environment, example = build("arithmetic"), Example("1+2=?", "3")
    assert script(environment, example, r"1+2=3. \boxed{3}") == (Outcome(1.0, {"boxed": 1.0}), ["1+2=?"])
    assert script(environment, example, r"\boxed{4}")[0] == Outcome(0.0, {"boxed": 1.0})
    assert script(environment, example, "it is 3.")[0] == Outcome(0.0, {"boxed": 0.0})


def test_arithmetic_never_trains_on_what_it_evaluates() -> None:
    environment = build("arithmetic")
    assert not any(is_held_out(example.id) for example in environment.examples("train")[:50])
    assert all(is_held_out(example.id) for example in environment.examples("test")[:50])


def test_a_number_is_guessed_with_hints() -> None:
    environment = build("guess-number")
    (six,) = [example for example in environment.examples("train") if example.reference == "6"]
    outcome, asked = script(environment, six, r"maybe \boxed{5}", r"\boxed{8}", r"so \boxed{6}")
    assert asked == ["1..9?", "5+?", "8-?"]
    assert outcome == Outcome(1.0, {"tries": 3, "guesses": 1.0, "heeded": 1.0})


def test_tries_run_out_and_an_answer_without_a_guess_is_one() -> None:
    environment = build("guess-number", tries=3)
    outcome, asked = script(environment, environment.examples("train")[0], "hm", r"\boxed{x}", r"\boxed{9}", "spare")
    assert asked == ["1..9?", "?", "?"]
    assert outcome == Outcome(0.0, {"tries": 3, "guesses": pytest.approx(1 / 3)})


def test_it_is_measured_whether_hints_are_heeded() -> None:
    assert hint_metrics([5, 8, 6], 6) == {"heeded": 1.0}
    assert hint_metrics([5, 2, 8, 8], 6) == {"heeded": pytest.approx(1 / 3)}  # down although up, up, and the same again
    assert hint_metrics([5], 6) == hint_metrics([], 6) == {}


def test_only_one_guess_in_an_answer_that_ends_counts() -> None:
    assert read_guess(Reply(r"so \boxed{6}.")) == 6
    several = (r"\boxed{1} or \boxed{6}", r"\boxed{6} \boxed{6}")
    for text in (*several, r"\boxed{-6}", r"\boxed{}", "6", r"\boxed{1234567}"):
        assert read_guess(Reply(text)) is None, text
    assert read_guess(Reply(r"\boxed{6} and on", cut=True)) is None


def turns_of(completion: Completion) -> list[list[int]]:
    """The tokens of each turn that the model sampled."""
    sampled = completion.sampled_T if completion.sampled_T is not None else np.ones(len(completion.token_ids_T), bool)
    runs = groupby(zip(completion.token_ids_T.tolist(), sampled.tolist(), strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for is_sampled, run in runs if is_sampled]


@pytest.mark.slow
def test_lengths_and_cuts_of_a_run_are_those_of_the_sampled_turns(tmp_path: Path) -> None:
    limit = 12
    config = TrainConfig.model_validate(
        {
            "model": {"model": "builtin:tiny", "lora_rank": 4},
            "backend": {"devices": "cpu", "adapter_path": str(tmp_path / "adapter")},
            "training": {"max_steps": 2, "batch_size": 3, "group_size": 4, "max_tokens": limit, "record": True},
            "environment": {"provider": "builtin", "id": "guess-number"},
            "logging": {"log_dir": str(tmp_path / "logs")},
        }
    )
    train(config)
    steps, rows = (
        [json.loads(line) for line in (tmp_path / "logs" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "emergence/generations.jsonl")
    )
    stop = tiny_tokenizer().eos_token_id
    for row, (step, groups) in zip(steps, read_recordings(tmp_path / "logs"), strict=True):
        played = [turns_of(completion) for group in groups for completion in group.completions_G]
        lengths = [sum(map(len, turns)) for turns in played]
        cut = [any(len(turn) == limit and turn[-1] != stop for turn in turns) for turns in played]
        assert row["turns"] > 1 and any(cut)
        assert row["completion_tokens_mean"] == pytest.approx(np.mean(lengths))
        assert row["completion_tokens_max"] == max(lengths)
        assert row["tokens_per_s"] * row["sample_time_s"] == pytest.approx(sum(lengths))
        assert row["max_token_hit_rate"] == pytest.approx(np.mean(cut))
        assert row["truncated"] == sum(cut)
        own = [generation for generation in rows if generation["step"] == step]
        assert [generation["num_tokens"] for generation in own] == lengths
        assert [generation["finish_reason"] == "length" for generation in own] == cut


@pytest.mark.slow
def test_turns_that_end_with_the_context_are_told_from_those_that_reach_max_tokens(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(
        {
            "model": {"model": "builtin:tiny", "lora_rank": 4},
            "backend": {"devices": "cpu", "adapter_path": str(tmp_path / "adapter")},
            # Hardly any token is the end, and there is no room for max_tokens after the prompt.
            "training": {"max_steps": 1, "batch_size": 1, "group_size": 4, "max_tokens": 255, "temperature": 20.0},
            "environment": {"provider": "builtin", "id": "guess-number"},
            "logging": {"log_dir": str(tmp_path / "logs")},
        }
    )
    train(config)
    row = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())
    assert 0 < row["context_hit_rate"] == row["max_token_hit_rate"]


def test_words_say_what_signs_say() -> None:
    environment = build("guess-number", style="words", top=50, tries=2)
    _, asked = script(environment, environment.examples("train")[41], r"\boxed{10}", "no")
    assert "from 1 to 50. You have 2 tries" in asked[0]
    assert asked[1] == "My number is higher than 10."


def test_halving_finds_every_number_in_four_tries() -> None:
    def halve(text: str) -> str:
        low, high = 1, 9
        for guess, sign in re.findall(r"<\|user\|>(\d+)([+-])\?", text):
            low, high = (int(guess) + 1, high) if sign == "+" else (low, int(guess) - 1)
        return rf"\boxed{{{(low + high) // 2}}}"

    groups = play(build("guess-number"), halve, n=1, count=9)
    assert [group.scores_G[0].value for group in groups] == [1.0] * 9
    for group in groups:
        (completion,) = group.completions_G
        assert completion.sampled_T is None or completion.sampled_T.sum() < len(completion.token_ids_T)


def call(expression: object, name: str = "calculate") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


PRODUCT = Example("What is 12*12?", "144")


def test_the_calculator_is_called_and_its_answer_used() -> None:
    outcome, replies = script(build("calculator"), PRODUCT, call("12*12"), r"It is \boxed{144}.")
    assert outcome == Outcome(1.0, {"calls": 1, "failed_calls": 0})
    assert replies == ["What is 12*12?", "144"]


def test_several_calls_may_come_in_one_turn_and_no_call_is_fine_too() -> None:
    environment = build("calculator")
    outcome, replies = script(environment, PRODUCT, call("12*2") + call("(1+2)*-3"), r"\boxed{1}")
    assert replies[1:] == ["24", "-9"]
    assert outcome == Outcome(0.0, {"calls": 2, "failed_calls": 0})
    assert script(environment, PRODUCT, r"\boxed{144}")[0].reward == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        call("__import__('os')"),
        call("2**99999999"),
        call("1/0"),
        call("9" * 500),
        call(7),
        call("1+1", name="eval"),
        "<tool_call>{broken</tool_call>",
        call("("),
        call("True"),
        call("-" * 150 + "1+"),
        call("1\x00"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(bad: str) -> None:
    outcome, replies = script(build("calculator"), PRODUCT, bad, r"\boxed{144}")
    assert outcome == Outcome(1.0, {"calls": 1, "failed_calls": 1})
    assert replies[1].startswith("error: ")


def test_calls_without_end_are_ended() -> None:
    outcome, _ = script(build("calculator", calls=2), PRODUCT, *[call("1+1")] * 9)
    assert outcome == Outcome(0.0, {"calls": 2, "failed_calls": 0})


def test_the_tool_reaches_the_model_through_the_chat() -> None:
    seen: list[str] = []

    def answer(text: str) -> str:
        seen.append(text)
        expression = re.findall(r"What is (\S+)\?", text)[0]
        return call(expression) if len(text.split("<|assistant|>")) == 2 else f"\\boxed{{{calculate(expression)}}}"

    groups = play(build("calculator", largest=20), answer, n=1, count=3, max_tokens=256)
    assert [group.scores_G[0].value for group in groups] == [1.0] * 3
    assert '"name": "calculate"' in seen[0]


def test_calculator_splits_share_no_question() -> None:
    environment = build("calculator", largest=9)
    train, held_out = ({example.id for example in environment.examples(split)[:300]} for split in ("train", "test"))
    assert len(train) > 50 and not train & held_out


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*"), e).map("({0[0]}{0[1]}{0[2]})".format),
        max_leaves=8,
    )
)
def test_the_calculator_computes_like_python(expression: str) -> None:
    assert calculate(expression) == eval(expression)


@pytest.mark.parametrize(
    ("id", "args", "text"),
    [
        ("guess_number", {}, 'Did you mean "guess-number"?'),
        ("wordle", {}, "Known: arithmetic, guess-number, calculator"),
        ("guess-number", {"topp": 5}, "args.topp is unknown.  Did you mean top?"),
        ("guess-number", {"top": 1}, "args.top is not valid"),
        ("guess-number", {"top": "9"}, "args.top is not valid"),
        ("guess-number", {"tries": True}, "args.tries is not valid"),
        ("guess-number", {"style": "song"}, "args.style is not valid"),
        ("arithmetic", {"x": 1}, "args.x is unknown.  Known: none."),
        ("calculator", {"calls": 0}, "args.calls is not valid"),
    ],
)
def test_what_cannot_be_played_is_rejected(id: str, args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(id, **args)
    assert text in str(caught.value)


def test_all_bad_arguments_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build("guess-number", top=0, tries=0, x=1)
    assert len(caught.value.issues) == 3


@pytest.mark.parametrize(("id", "is_said"), [("guess-number", True), ("calculator", False)])
def test_problems_that_are_in_both_splits_are_named(id: str, is_said: bool) -> None:
    tables: dict[str, Any] = {"environment": {"provider": "builtin", "id": id}, "eval": {"every": 1}}
    stream = StringIO()
    tasks = EnvironmentTasks(build_config(tables, {}, "run.toml"), Console(stream))
    try:
        tasks.load(tiny_tokenizer())
    finally:
        tasks.close()
    assert ("the same problems for training and for evaluation" in stream.getvalue()) == is_said


def test_an_own_class_without_training_rows_is_told_to_return_some() -> None:
    class Empty:
        def examples(self, split: str) -> list[Example]:
            return []

        async def rollout(self, example: Example, chat: object) -> Outcome:
            return Outcome(0.0)

    with pytest.raises(ConfigError, match="has no rows to train on") as caught:
        load_split(Empty(), Section(provider="my_module.Empty"), "train")
    assert "Try: return at least one Example from examples('train')" in str(caught.value)
    assert "id =" not in str(caught.value)
