"""An environment in a process of its own, which can be ended when it hangs.

Code that never returns and never lets go of the GIL cannot be stopped by a thread beside it. So the environment runs in
another process. When that does not respond for `timeout_s`, or dies, the rollouts that were running in it have failed;
the others are played again in a new process, where every turn they had already taken is answered as it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from retrain.data import Endless
from retrain.environments import Chat, ChatOver, Outcome, Reply, Say
from retrain.environments.liveness import Liveness
from retrain.environments.process import EnvironmentProcess
from retrain.environments.wire import Start, read_example, reply_fields, restore_error
from retrain.errors import PluginError, RetrainError, RolloutError
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

Place = tuple[str, int | None, int]
"""Of an example in the environment: the split, the seed of an endless one, the number."""

_LOOK_S = 0.25
# An event loop that has not turned for this long is blocked; whose fault that is, is known only to whoever ran in it.
_BLOCKED_S = 1.0
# One that has not turned for this long when the run is over is not waited for.
_GONE_S = 3.0


class RolloutTimeout(RolloutError):
    """A rollout that was ended because it let nothing else run."""


@dataclass(frozen=True)
class _Turn:
    """What a rollout asked for, and its answer when it is there."""

    request: tuple[Any, ...]
    answer: asyncio.Task[Reply]


class RemoteEnvironment:
    """The environment that `[environment]` names, in another process. Errors of its making are raised here."""

    def __init__(self, section: schema.Environment, search_paths: Sequence[str], say: Say) -> None:
        self.section = section
        self.search_paths = tuple(search_paths)
        self.say = say
        self.who = f"environment {section.id or section.provider!r}"
        self._splits: list[str] = []
        self._liveness = Liveness.create()
        self._starting = threading.Lock()
        self._opening = asyncio.Lock()
        self._opened: EnvironmentProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._blocked_s = 0.0
        self._blocked_since: float | None = None
        self._process: EnvironmentProcess | None = None
        self._ended = False
        try:
            self._running_process()
        except BaseException:
            self.end()
            raise

    def examples(self, split: str) -> Sequence[Example]:
        """The problems of a split, checked; each is fetched when it is asked for."""
        count, is_endless = self._call("split", split)
        if split not in self._splits:
            self._splits.append(split)
        return RemoteEndless(self, split) if is_endless else RemoteExamples(self, split, range(count))

    def fetch(self, split: str, seed: int | None, places: Sequence[int]) -> list[Example]:
        """Examples by their numbers."""
        rows = self._call("items", split, seed, tuple(places))
        return [read_example(row, (split, seed, place)) for row, place in zip(rows, places, strict=True)]

    async def open(self) -> None:
        """Start what the environment holds, and begin to watch it."""
        await self._ready()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Let the environment give back what it holds, and end its process."""
        if self._watching is not None:
            self._watching.cancel()
        process = self._process
        if process is not None and process.is_alive and process is self._opened:
            answer = asyncio.wrap_future(process.call("close"))
            while not answer.done() and time.monotonic() - self._liveness.beat_at < _GONE_S:
                await asyncio.wait([answer], timeout=_LOOK_S)
            if not answer.done():
                answer.cancel()
                self.say("The environment does not respond and was ended without being closed.")
            elif answer.result()["kind"] == "error":
                self.say(f"The environment could not be closed: {answer.result()['detail']}")
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End its process and all that this started. A second call does nothing."""
        with self._starting:
            if not self._ended:
                self._ended = True
                if self._process is not None:
                    self._process.end()
                self._liveness.close()

    def blocked_s(self) -> float:
        """Seconds in which no rollout could run, because one of them or nothing at all let it; never goes back."""
        since = self._blocked_since
        return self._blocked_s + (time.monotonic() - since if since is not None else 0.0)

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Play one example once, again from its beginning if another rollout took the process down."""
        turns: list[_Turn] = []
        try:
            while True:
                outcome = await _Rollout(await self._ready(), chat, turns).play(example)
                if outcome is not None:
                    return outcome
        finally:
            for turn in turns:
                turn.answer.cancel()

    def _running_process(self) -> EnvironmentProcess:
        """The process, a new one if need be."""
        with self._starting:
            if self._ended:
                raise RolloutError("the environment has ended.")
            if self._process is None:
                self._process = self._start(self.say)
            elif not self._process.is_alive:
                self._process.end()
                how = "its process did not respond" if self._process.was_unresponsive else self._process.end_text
                self.say(f"Restarting {self.who}: {how}")
                # What it says while it loads was said the first time.
                self._process = self._start(lambda line: None)
                self._process.say = self.say
            return self._process

    def _start(self, say: Say) -> EnvironmentProcess:
        self._liveness.clear()
        process = EnvironmentProcess(Start(self.section, self.search_paths, tuple(self._splits)), self._liveness, say)
        try:
            reply = process.started.result()
        except BaseException:  # interrupted while it was loading
            process.end()
            raise
        if reply["kind"] == "ready":
            return process
        process.end()
        if reply["kind"] == "failed":
            raise restore_error(reply, PluginError)
        raise PluginError(f"{self.who} could not be loaded: {process.end_text}\n{process.last_lines()}".rstrip())

    def _call(self, kind: str, *arguments: Any) -> Any:
        """Ask for something and wait for it, in any thread but that of the rollouts."""
        process = self._running_process()
        reply = process.call(kind, *arguments).result()
        if reply["kind"] == "died":
            limit = f"its process did not respond for {self.section.timeout_s:g} s"
            how = limit if process.was_unresponsive else process.end_text
            raise PluginError(f"{self.who} gave no examples: {how}\n{process.last_lines()}".rstrip())
        return _read_result(reply, PluginError)

    async def _ready(self) -> EnvironmentProcess:
        """The process with all that the environment holds started."""
        process = self._process
        if process is not None and process.is_alive and process is self._opened:
            return process
        async with self._opening:
            process = await asyncio.to_thread(self._running_process)
            if process is not self._opened:
                reply = await asyncio.wrap_future(process.call("open"))
                if reply["kind"] == "died" or (reply["kind"] == "error" and not reply["error"]):
                    why = process.end_text if reply["kind"] == "died" else reply["detail"]
                    raise RolloutError(f"the environment could not be started: {why}")
                _read_result(reply, RolloutError)
                self._opened = process
            return process

    async def _watch(self) -> None:
        """Count the time in which the environment blocks itself, and end it when that is too long."""
        while True:
            await asyncio.sleep(_LOOK_S)
            silent_s = self._note_blocking()
            process = self._opened
            if process is not None and process.is_alive and silent_s > self.section.timeout_s:
                await asyncio.to_thread(process.end_unresponsive)

    def _note_blocking(self) -> float:
        beat_at, now = self._liveness.beat_at, time.monotonic()
        if now - beat_at > _BLOCKED_S:
            if self._blocked_since is None:
                self._blocked_since = beat_at
        elif self._blocked_since is not None:
            self._blocked_s += beat_at - self._blocked_since
            self._blocked_since = None
        return now - beat_at


class _Rollout:
    """One attempt at a rollout, in one process. `turns` are those of earlier attempts, and get those of this one."""

    def __init__(self, process: EnvironmentProcess, chat: Chat, turns: list[_Turn]) -> None:
        self.process = process
        self.chat = chat
        self.turns = turns
        self.taken = 0
        self.number = 0
        self.inbox: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    async def play(self, example: Example) -> Outcome | None:
        """How it went; None when the process ended through no fault of this rollout."""
        loop = asyncio.get_running_loop()

        def hear(reply: Mapping[str, Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(self.inbox.put_nowait, reply)

        self.number = self.process.listen(hear)
        self.process.send("play", self.number, example.meta["place"], self.chat.seed)
        is_over = False
        try:
            while True:
                reply = await self.inbox.get()
                is_over = reply["kind"] != "turn"
                if is_over:
                    return self._finish(reply)
                self._answer(reply)
        except asyncio.CancelledError:
            self.process.send("cancel", self.number)
            while not is_over and (await self.inbox.get())["kind"] == "turn":
                pass
            raise
        finally:
            self.process.forget(self.number)
            if not is_over:
                self.process.send("cancel", self.number)

    def _answer(self, reply: Mapping[str, Any]) -> None:
        """Have the model answer a turn, or give the answer that it was given before."""
        request = (reply["method"], reply["messages"], reply["tools"])
        if self.taken == len(self.turns):
            ask = self.chat.ask if reply["method"] == "ask" else self.chat.reply_to
            answer = asyncio.ensure_future(ask(reply["messages"], reply["tools"]))
            self.turns.append(_Turn(request, answer))
        turn = self.turns[self.taken]
        self.taken += 1
        if turn.request != request:
            raise self._did_not_repeat()
        turn.answer.add_done_callback(lambda answer: self._deliver(reply["turn"], answer))

    def _deliver(self, turn: int, answer: asyncio.Task[Reply]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self.process.send("answer", turn, "reply", *reply_fields(answer.result()))
        elif isinstance(error, ChatOver):
            self.process.send("answer", turn, "over", str(error))
        else:
            text = str(error) if isinstance(error, RetrainError) else f"{type(error).__name__}: {error}"
            self.process.send("answer", turn, "error", text)

    def _finish(self, reply: Mapping[str, Any]) -> Outcome | None:
        if reply["kind"] == "died":
            self._check_blame()
            return None
        if self.taken < len(self.turns):
            raise self._did_not_repeat()
        if reply["kind"] == "over":
            raise ChatOver(reply["detail"])
        if reply["kind"] == "error":
            raise restore_error(reply, RolloutError)
        return Outcome(reply["reward"], reply["metrics"], reply["truncated"])

    def _check_blame(self) -> None:
        """Raise if this rollout ran when the process ended, or nobody knows which one did."""
        process = self.process
        if process.suspects and self.number not in process.suspects:
            return
        where = f"\n{process.last_lines()}".rstrip()
        if process.was_unresponsive:
            raise RolloutTimeout(f"its process did not respond any more and was ended{where}")
        raise RolloutError(f"{process.end_text}{where}")

    def _did_not_repeat(self) -> RolloutError:
        return RolloutError("another rollout ended the environment's process, and this one did not repeat itself.")


def _read_result(reply: Mapping[str, Any], unknown: type[RetrainError]) -> Any:
    if reply["kind"] == "error":
        raise restore_error(reply, unknown)
    return reply["value"]


class RemoteExamples(Sequence[Example]):
    """Examples of a split, each fetched when it is asked for."""

    def __init__(self, environment: RemoteEnvironment, split: str, places: range) -> None:
        self._environment = environment
        self._split = split
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteExamples: ...
    def __getitem__(self, index: int | slice) -> Example | RemoteExamples:
        if isinstance(index, slice):
            return RemoteExamples(self._environment, self._split, self._places[index])
        return self._environment.fetch(self._split, None, (self._places[index],))[0]


class RemoteEndless(Endless):
    """Examples without end, drawn in the environment's process."""

    def __init__(self, environment: RemoteEnvironment, split: str, seed: int = 0) -> None:
        super().__init__(_draw_nothing, seed)
        self._environment = environment
        self._split = split

    def reseed(self, seed: int) -> RemoteEndless:
        """The same kind of examples under another seed."""
        return RemoteEndless(self._environment, self._split, seed)

    def named(self, origin: str) -> RemoteEndless:
        """The same examples: errors name the environment already."""
        return self

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return self._environment.fetch(self._split, self._seed, range(*index.indices(len(self))))
        if index < 0:
            raise IndexError("there is no last example in an endless source")
        return self._environment.fetch(self._split, self._seed, (index,))[0]


def _draw_nothing(rng: random.Random) -> Example:
    raise AssertionError("examples of a remote environment are drawn in its own process")
