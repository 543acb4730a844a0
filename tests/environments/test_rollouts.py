"""Rollouts of an environment: how they are batched, what a failure costs, and what is logged."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from retrain.advantages import CreditAssigner
from retrain.config.schema import Algorithm, TrainConfig
from retrain.data import ExampleOrder
from retrain.datums import build_datums
from retrain.environments import Chat, ChatOver, Environment, Outcome, run_rollout, turns
from retrain.environments.runner import RolloutScore
from retrain.errors import RolloutError
from retrain.inference_engine import Turns
from retrain.rollout import ChunkedScorer, GroupCollector
from retrain.types import Example, Group, Sampling
from tests.environments.table import TextEngine, play, player

Rollout = Callable[[Example, Chat], Awaitable[Outcome]]


class Plays:
    """An environment of a few examples whose rollout is a function."""

    def __init__(self, rollout: Rollout) -> None:
        self.play = rollout

    def examples(self, split: str) -> Sequence[Example]:
        return [Example(f"{n}+1=?", str(n + 1), id=str(n)) for n in range(4)]

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        return await self.play(example, chat)


async def one_turn(example: Example, chat: Chat) -> Outcome:
    reply = await chat.ask(str(example.prompt))
    return Outcome(float(reply.text == example.reference), {"length": len(reply.text)})


async def guess(example: Example, chat: Chat) -> Outcome:
    """As many turns as the example's number plus one."""
    for _ in range(int(example.id) + 1):
        await chat.ask(str(example.prompt))
    return Outcome(1.0)


def test_all_turns_that_wait_are_one_batch() -> None:
    engine = TextEngine(lambda _: "2")
    play(Plays(guess), engine, n=3, count=4)
    assert engine.sizes == [12, 9, 6, 3]
    # The first turn of a group shares its prompt, which is then prefilled once.
    assert len(engine.batches[0]) == 4


def test_prompts_that_are_cut_are_noted_once() -> None:
    logged: list[str] = []
    runner = player(Plays(one_turn), logged.append, max_prompt_tokens=5)
    try:
        for _ in range(2):
            runner.sample_and_score(TextEngine(lambda _: "2"), Plays(one_turn).examples("train"), Sampling(64, n=2))
    finally:
        runner.close()
    assert len(logged) == 1 and logged[0].startswith("Note: [training] max_prompt_tokens = 5 cuts prompts; one has ")


def test_a_batch_is_in_the_order_of_the_rollouts_whoever_asks_first() -> None:
    async def late(example: Example, chat: Chat) -> Outcome:
        await asyncio.sleep(0.01 * (3 - int(example.id)))
        return await one_turn(example, chat)

    engine = TextEngine(lambda _: "2")
    play(Plays(late), engine, n=1, count=4)
    assert [text[8] for text in engine.batches[0]] == ["0", "1", "2", "3"]


def test_a_slow_rollout_holds_the_others_up_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)

    async def slow(example: Example, chat: Chat) -> Outcome:
        await asyncio.sleep(1.5 if example.id == "0" else 0.0)
        return await one_turn(example, chat)

    engine = TextEngine(lambda _: "2")
    play(Plays(slow), engine, n=1, count=2)
    assert engine.sizes == [1, 1]


def test_an_engine_that_serves_turns_is_given_each_as_it_comes() -> None:
    class Serving(TextEngine):
        def serve(self, turns: Turns) -> None:
            while taken := turns.take(wait=True):
                for turn in taken:
                    self.sizes.append(1)
                    text = self.tokenizer.decode(turn.prompt_ids)
                    turn.answer.set_result(self.complete(text, turn.sampling.max_tokens))

    engine = Serving(lambda _: "2")
    groups = play(Plays(guess), engine, n=2, count=3)
    assert sum(engine.sizes) == 12
    assert [score.value for group in groups for score in group.scores_G] == [1.0] * 6


def test_a_run_that_has_to_repeat_samples_turns_in_rounds() -> None:
    class Serving(TextEngine):
        def serve(self, turns: Turns) -> None:
            raise AssertionError("turns that enter as they come round differently every time")

    engine = Serving(lambda _: "2")
    play(Plays(one_turn), engine, n=2, count=3, in_rounds=True)
    assert sum(engine.sizes) == 6


def test_an_engine_that_stops_serving_early_is_an_error() -> None:
    class Lazy(TextEngine):
        def serve(self, turns: Turns) -> None:
            turns.take(wait=True)

    with pytest.raises(RolloutError, match="stopped serving while 4 rollouts"):
        play(Plays(one_turn), Lazy(lambda _: "2"))


def test_an_error_of_the_engine_ends_the_batch() -> None:
    class Broken(TextEngine):
        def generate(self, *_: Any) -> Any:
            raise RolloutError("out of memory")

    with pytest.raises(RolloutError, match="out of memory"):
        play(Plays(one_turn), Broken(lambda _: "2"))


def test_advantages_land_on_sampled_tokens_only() -> None:
    async def two(example: Example, chat: Chat) -> Outcome:
        first = await chat.ask(str(example.prompt))
        await chat.ask("again")
        return Outcome(float(first.text == "good"))

    answers = iter(["good", "bad", "x", "y"])
    groups = play(Plays(two), lambda _: next(answers), n=2, count=1)
    credit = CreditAssigner(TrainConfig(algorithm=Algorithm(advantage_mode="grpo", transform_mode="none"))).assign(
        groups, None, 0
    )
    datums = build_datums(groups, credit)
    assert len(datums) == 2
    for datum, sign in zip(datums, (1, -1), strict=True):
        assert not datum.mask_T.all() and datum.mask_T.any()
        assert np.all(np.sign(datum.advantages_T[datum.mask_T]) == sign)
        assert not datum.advantages_T[~datum.mask_T].any()


def test_an_environment_that_is_not_asynchronous_is_told_so() -> None:
    class Plain:
        def examples(self, split: str) -> list[Example]:
            return []

        def rollout(self, example: Example, chat: Chat) -> Outcome:
            return Outcome(1.0)

    with pytest.raises(TypeError, match=r"rollout returned Outcome at once\.  Try: async def rollout"):
        asyncio.run(run_rollout(cast("Environment", Plain()), Example("a", "b"), cast("Chat", None)))


def fails(when: str) -> Rollout:
    async def rollout(example: Example, chat: Chat) -> Outcome:
        broken = example.id == "0"
        if broken and when == "setup":
            raise ValueError("no board")
        await chat.ask(str(example.prompt))
        if broken and when == "turn":
            raise KeyError("piece")
        if broken and when == "never ends":
            await asyncio.sleep(3600)
        while broken and when == "will not stop":
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)
        if broken and when == "exit":
            raise SystemExit(3)
        if broken and when == "interrupt":
            raise KeyboardInterrupt
        if broken and when == "leak":
            raise asyncio.CancelledError
        if broken and when == "inner timeout":
            raise TimeoutError("the tool was slow")
        values = {"nan": float("nan"), "infinite": float("inf"), "absurd": 1e30}
        if broken and when == "wrong type":
            return 1.0  # type: ignore[return-value]
        return Outcome(values.get(when, 1.0) if broken else 1.0)

    return rollout


@pytest.mark.parametrize(
    ("when", "outcome", "detail"),
    [
        ("setup", "error", "ValueError: no board"),
        ("turn", "error", "KeyError: 'piece'"),
        ("never ends", "timeout", "no result after 1.5 s of the environment's own time"),
        ("inner timeout", "error", "TimeoutError: the tool was slow"),
        ("will not stop", "timeout", "and it could not be cancelled"),
        ("exit", "error", "SystemExit: 3"),
        ("interrupt", "error", "KeyboardInterrupt"),
        ("leak", "error", "CancelledError"),
        ("absurd", "error", "a reward of 1e+30; the limit is ±1,000,000"),
        ("nan", "error", "a reward of nan"),
        ("infinite", "error", "a reward of inf"),
        ("wrong type", "error", "returned float instead of an Outcome"),
    ],
)
def test_a_failed_rollout_is_left_out_and_not_scored_as_wrong(when: str, outcome: str, detail: str) -> None:
    logged: list[str] = []
    own = player(Plays(fails(when)), logged.append, timeout_s=1.5)
    examples = own.environment.examples("train")
    groups = own.sample_and_score(TextEngine(lambda _: "2"), examples, Sampling(max_tokens=64, n=2)).groups
    own.close()
    assert [score.outcome for score in groups[0].scores_G] == [outcome] * 2
    assert detail in groups[0].scores_G[0].detail
    assert all(score.outcome == "right" for group in groups[1:] for score in group.scores_G)
    assert own.group_metrics(groups)["rollout_errors"] == 2
    assert logged[0].startswith("The environment failed for 2 of 8 rollouts") and detail in logged[1]


def test_a_failed_rollout_takes_no_part_in_training() -> None:
    async def rollout(example: Example, chat: Chat) -> Outcome:
        reply = await chat.ask(str(example.prompt))
        if reply.text == "break":
            raise ValueError("broken")
        return Outcome(float(reply.text == "good"))

    answers = iter(["good", "break", "bad", "break", "good", "bad"])
    groups = play(Plays(rollout), lambda _: next(answers), n=3, count=2)
    credit = CreditAssigner(TrainConfig(algorithm=Algorithm(advantage_mode="grpo", transform_mode="none"))).assign(
        groups, None, 0
    )
    assert len(build_datums(groups, credit)) == 4


def test_a_group_with_one_rollout_left_is_not_trained_on() -> None:
    answers = iter(["good", "break"])

    async def rollout(example: Example, chat: Chat) -> Outcome:
        reply = await chat.ask(str(example.prompt))
        if reply.text == "break":
            raise ValueError("broken")
        return Outcome(1.0)

    groups = play(Plays(rollout), lambda _: next(answers), n=2, count=1)
    credit = CreditAssigner(TrainConfig()).assign(groups, None, 0)
    assert build_datums(groups, credit) == []
    # With a penalty for leaving the reference the one that was scored takes part, and earns nothing.
    assert [row.advantages_T.any() for row in build_datums(groups, credit, all_groups=True)] == [False]


def test_more_than_half_failing_stops_the_run() -> None:
    async def broken(example: Example, chat: Chat) -> Outcome:
        raise ValueError("no board")

    with pytest.raises(RolloutError, match=r"failed for 3 of 4 rollouts so far \(error: ValueError: no board\)"):
        play(Plays(broken), lambda _: "2")


def test_the_run_stops_as_soon_as_more_than_half_have_failed() -> None:
    async def mostly_fails(example: Example, chat: Chat) -> Outcome:
        await chat.ask(str(example.prompt))
        if example.id == "3":
            await asyncio.sleep(600)
        raise RuntimeError("no such tool")

    began = time.monotonic()
    with pytest.raises(RolloutError, match="failed for 5 of 8 rollouts"):
        play(Plays(mostly_fails), lambda _: "2", n=2, count=4)
    assert time.monotonic() - began < 10


def test_code_that_blocks_the_event_loop_is_found_out() -> None:
    async def blocks(example: Example, chat: Chat) -> Outcome:
        time.sleep(4)
        return Outcome(1.0)

    started = time.monotonic()
    with pytest.raises(RolloutError, match="the environment has blocked every rollout"):
        play(Plays(blocks), lambda _: "2", n=2, count=1, timeout_s=1.0)
    assert time.monotonic() - started < 4 + 5


def test_time_spent_sampling_is_not_the_environments() -> None:
    class Slow(TextEngine):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            time.sleep(1.0)
            return super().generate(prompts, sampling)

    groups = play(Plays(guess), Slow(lambda _: "2"), n=2, count=2, timeout_s=0.8)
    assert all(score.counts for group in groups for score in group.scores_G)


def test_turns_are_capped_and_the_rest_is_scored_as_the_environment_scores_it() -> None:
    async def patient(example: Example, chat: Chat) -> Outcome:
        try:
            while True:
                await chat.ask("more")
        except ChatOver:
            return Outcome(0.25)

    async def careless(example: Example, chat: Chat) -> Outcome:
        while True:
            await chat.ask("more")

    for environment, reward in ((Plays(patient), 0.25), (Plays(careless), 0.0)):
        own = player(environment, max_turns=3)
        groups = own.sample_and_score(
            TextEngine(lambda _: "2"), environment.examples("train")[:1], Sampling(max_tokens=9, n=2)
        ).groups
        own.close()
        assert [score.value for score in groups[0].scores_G] == [reward] * 2
        counts = {"truncated": 2, "context_hit_rate": 0.0, "env_forks": 0, "rollout_errors": 0}
        assert own.group_metrics(groups) == {"turns": 3.0, **counts}


def test_metrics_are_means_over_the_rollouts_that_count() -> None:
    own = player(Plays(one_turn))
    answers = iter(["1", "12", "123", "1234"])
    examples = own.environment.examples("train")[:2]
    groups = own.sample_and_score(TextEngine(lambda _: next(answers)), examples, Sampling(max_tokens=9, n=2)).groups
    own.close()
    metrics = own.group_metrics(groups)
    assert metrics["env/length"] == pytest.approx(2.5)
    assert metrics["turns"] == 1.0
    assert [score.outcome for score in groups[0].scores_G] == ["right", "wrong"]


def test_one_problem_that_always_fails_does_not_end_a_step_that_is_played_in_parts() -> None:
    async def choosy(example: Example, chat: Chat) -> Outcome:
        if example == examples[0]:
            raise ValueError("not this one")
        return await guess(example, chat)

    environment = Plays(choosy)
    examples = environment.examples("train")
    own = player(environment)
    sampling = Sampling(max_tokens=64, n=2)
    collector = GroupCollector(ExampleOrder(examples, seed=0), ChunkedScorer(own, 1), sampling, 0, resample_rounds=3)
    errors = [collector.collect(TextEngine(lambda _: "2"), step, 3).errors for step in range(3)]
    own.close()
    assert sum(errors) > 0


def test_an_environment_that_asks_nothing_is_an_error() -> None:
    async def silent(example: Example, chat: Chat) -> Outcome:
        return Outcome(1.0)

    with pytest.raises(RolloutError, match="never called the model"):
        play(Plays(silent), lambda _: "2")


def test_rollouts_that_begin_differently_keep_prompts_of_their_own() -> None:
    async def varied(example: Example, chat: Chat) -> Outcome:
        await chat.ask(f"number {chat.seed % 1000}")
        return Outcome(1.0)

    (group,) = play(Plays(varied), lambda _: "2", n=3, count=1)
    first, second, _ = group.completions_G
    assert first.segments == ()
    assert not np.array_equal(second.segments[0].prompt_ids, group.prompt_ids)


def test_what_an_environment_holds_is_opened_once_and_closed_at_the_end() -> None:
    calls: list[str] = []

    class Holds(Plays):
        async def open(self) -> None:
            calls.append("open")

        async def close(self) -> None:
            calls.append("close")

    own = player(Holds(one_turn))
    for _ in range(2):
        own.sample_and_score(TextEngine(lambda _: "1"), own.environment.examples("")[:1], Sampling(max_tokens=9, n=2))
    own.close()
    own.close()
    assert calls == ["open", "close"]


def test_an_environment_that_does_not_open_says_why() -> None:
    class Broken(Plays):
        async def open(self) -> None:
            raise OSError("port taken")

        async def close(self) -> None: ...

    with pytest.raises(RolloutError, match="could not be started: OSError"):
        play(Broken(one_turn), lambda _: "1")


def test_an_interrupt_while_sampling_leaves_at_once() -> None:
    class Interrupted(TextEngine):
        def generate(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(Plays(one_turn), Interrupted(lambda _: "2"))


def test_blocking_work_in_threads_is_fine() -> None:
    async def threaded(example: Example, chat: Chat) -> Outcome:
        reply = await chat.ask(str(example.prompt))
        with ThreadPoolExecutor(1) as pool:
            value = await asyncio.get_running_loop().run_in_executor(pool, len, reply.text)
        return Outcome(float(value))

    (group,) = play(Plays(threaded), lambda _: "2", n=2, count=1)
    assert all(isinstance(score, RolloutScore) and score.value == 1.0 for score in group.scores_G)


def test_a_group_is_delivered_when_its_last_rollout_is_done() -> None:
    release, delivered = threading.Event(), dict[int, Group]()

    async def rollout(example: Example, chat: Chat) -> Outcome:
        reply = await chat.ask(str(example.prompt))
        if example is examples[0]:
            assert await asyncio.to_thread(release.wait, 10), "the other group was not delivered meanwhile"
        return Outcome(float(reply.text == "good"))

    def deliver(at: int, group: Group) -> None:
        delivered[at] = group
        release.set()

    own = player(Plays(rollout))
    examples = own.environment.examples("train")[:2]
    groups = own.sample_and_score(TextEngine(lambda _: "good"), examples, Sampling(max_tokens=64, n=2), deliver).groups
    own.close()
    assert list(delivered) == [1, 0]
    assert all(group is delivered[at] for at, group in enumerate(groups))
