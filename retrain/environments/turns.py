"""Connects rollouts, which run in an event loop in a separate thread, with the engine, which runs in the caller's.

A streaming engine receives each turn as it comes. Other engines get them in rounds: once all live rollouts wait for a
reply, their turns form one batch, ordered by rollout number. A run is thus bit-reproducible unless an environment is
slower than `PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from retrain.errors import RolloutError
from retrain.inference_engine import InferenceEngine, Progress, StreamingEngine, Turn
from retrain.rollout import check_completions
from retrain.runtime.clock import awake_s
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling

T = TypeVar("T")
PATIENCE_S = 30.0
"""How long waiting turns are held back for rollouts that are still busy."""
_BEAT_S = 0.2
_ENDING_S = 2.0


class EventLoop:
    """An event loop in a daemon thread, so that blocked code does not prevent exit."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel running tasks and stop; a thread that hangs ends with the process."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=_ENDING_S)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_cancel_all())
            self.loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True)
class _Pending:
    rollout: int
    turn: Turn


class TurnQueue:
    """The turns of one batch of rollouts."""

    def __init__(self, sampling: Sampling, rollouts: int, blocked_after_s: float, progress: Progress) -> None:
        self.sampling = replace(sampling, n=1)
        self.blocked_after_s = blocked_after_s
        self.progress = progress
        self.live = set(range(rollouts))
        self.pending: list[_Pending] = []
        self.asked = [0] * rollouts
        self.changed = threading.Condition()
        self.beat = awake_s()

    async def sample(self, rollout: int, prompt_ids: IntArray, max_tokens: int) -> Completion:
        """Sample one turn; called in the event loop."""
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        answer: Future[Completion] = Future()
        # Not wrap_future: a cancelled rollout must not cancel a future that the engine is about to set.
        answer.add_done_callback(lambda _: loop.call_soon_threadsafe(answered.set))
        seed = derive_seed(self.sampling.seed, f"turn/{rollout}", self.asked[rollout])
        turn = Turn(prompt_ids, replace(self.sampling, max_tokens=max_tokens, seed=seed), answer)
        with self.changed:
            self.asked[rollout] += 1
            self.pending.append(_Pending(rollout, turn))
            self.changed.notify()
        await answered.wait()
        return answer.result()

    def leave(self, rollout: int) -> None:
        """Remove a finished rollout, and turns that it no longer waits for; called in the event loop."""
        with self.changed:
            self.live.discard(rollout)
            self.pending = [pending for pending in self.pending if pending.rollout != rollout]
            self.changed.notify()

    async def keep_beating(self) -> None:
        """Send heartbeats of the event loop."""
        while True:
            self.beat = awake_s()
            await asyncio.sleep(_BEAT_S)

    def take(self, wait: bool) -> list[Turn]:
        """All pending turns. With `wait`, at least one, or none once all rollouts are done."""
        return [pending.turn for pending in self._take(lambda: bool(self.pending) or not wait)]

    def take_round(self) -> list[Turn]:
        """One turn of every live rollout, by number; after `PATIENCE_S` only of those that have one."""
        started = awake_s()

        def is_complete() -> bool:
            waiting = {pending.rollout for pending in self.pending}
            return waiting >= self.live or (bool(waiting) and awake_s() - started > PATIENCE_S)

        return [pending.turn for pending in sorted(self._take(is_complete), key=lambda pending: pending.rollout)]

    def _take(self, is_ready: Callable[[], bool]) -> list[_Pending]:
        started = awake_s()
        with self.changed:
            while self.live and not is_ready():
                self.changed.wait(timeout=1.0)
                silent = awake_s() - max(started, self.beat)
                if silent > self.blocked_after_s:
                    raise RolloutError(
                        f"the environment has blocked every rollout for {silent:.0f} s: a call in it does not return "
                        "and does not await.  Try: await asyncio.to_thread(...) around it, or a larger "
                        "[environment] timeout_s."
                    )
            taken, self.pending = self.pending, []
        self.progress("rollouts", len(self.asked) - len(self.live), len(self.asked))
        return taken


def play(
    loop: EventLoop,
    engine: InferenceEngine,
    queue: TurnQueue,
    rollouts: Sequence[Coroutine[object, object, T]],
    in_rounds: bool = False,
) -> list[T]:
    """Run rollouts, sampling their turns in this thread; returns their results in order.

    An error raised by one of them cancels the others.
    """
    running = loop.submit(_run_all(queue, rollouts))
    try:
        if isinstance(engine, StreamingEngine) and not in_rounds:
            engine.serve(queue)
        else:
            _serve_in_rounds(engine, queue)
        if queue.live:
            raise RolloutError(f"the inference engine stopped serving while {len(queue.live)} rollouts were running.")
        return running.result()
    except BaseException:
        running.cancel()
        raise


async def _run_all(queue: TurnQueue, rollouts: Sequence[Coroutine[object, object, T]]) -> list[T]:
    async def run(number: int, rollout: Coroutine[object, object, T]) -> T:
        try:
            return await rollout
        finally:
            queue.leave(number)

    beating = asyncio.create_task(queue.keep_beating())
    running = [asyncio.create_task(run(number, rollout)) for number, rollout in enumerate(rollouts)]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in (beating, *running):
            task.cancel()


def _serve_in_rounds(engine: InferenceEngine, queue: TurnQueue) -> None:
    number = 0
    while turns := queue.take_round():
        # Near the end of the context a turn has a lower limit, and an engine takes one limit per batch.
        turns.sort(key=lambda turn: -turn.sampling.max_tokens)
        for limit, alike in groupby(turns, key=lambda turn: turn.sampling.max_tokens):
            seed = derive_seed(queue.sampling.seed, "round", number)
            _answer(engine, list(alike), replace(queue.sampling, max_tokens=limit, seed=seed))
            number += 1


def _answer(engine: InferenceEngine, turns: list[Turn], sampling: Sampling) -> None:
    """Sample one batch. First turns of a group share their prompt, which is prefilled once."""
    groups = [list(group) for _, group in groupby(turns, key=lambda turn: turn.prompt_ids.tobytes())]
    if len({len(group) for group in groups}) > 1:
        groups = [[turn] for turn in turns]
    sampling = replace(sampling, n=len(groups[0]))
    drawn = engine.generate([np.asarray(group[0].prompt_ids) for group in groups], sampling)
    check_completions(engine, drawn, len(groups), sampling.n)
    for group, completions in zip(groups, drawn, strict=True):
        for turn, completion in zip(group, completions, strict=True):
            turn.answer.set_result(completion)
