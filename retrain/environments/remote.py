"""An environment in a separate process, which can be killed when it hangs.

A thread cannot stop code that never returns and never releases the GIL, so the environment runs in another process. If
that process does not respond for `timeout_s`, or dies, the rollouts that were running in it have failed; the others are
restarted in a new process, where their earlier turns get the same replies as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from retrain.data import Endless, Lazy
from retrain.environments import Chat, ChatOver, Log, Outcome, Reply
from retrain.environments.liveness import Liveness
from retrain.environments.process import EnvironmentProcess
from retrain.environments.verifiers.modules import module_name
from retrain.environments.wire import Start, WireReply, read_example, reply_fields, restore_error
from retrain.errors import PluginError, RetrainError, RolloutError
from retrain.isolation.sources import read_all_sources
from retrain.plugins import REGISTRIES, module_of_plugin
from retrain.runtime.clock import awake_s
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

_POLL_S = 0.25
# An event loop without a heartbeat for this long is blocked.
_BLOCKED_S = 1.0
# At the end of a run, an event loop without a heartbeat for this long is not waited for.
_GONE_S = 3.0
# How often the process may die while none of its rollouts runs, before all are given up.
_DEATHS = 2


def named_modules(section: schema.Environment) -> set[str]:
    """The modules of the user that the `[environment]` table names: that of a plugin, or one that its id names."""
    if module := module_of_plugin("environment", section.provider):
        return {module}
    id_is_module = REGISTRIES["environment"].facts(section.provider).id_is_module
    return {module_name(section.id)} if id_is_module else set()


class RolloutTimeout(RolloutError):
    """A rollout that was stopped because it blocked all others."""


@dataclass(frozen=True)
class _Turn:
    """A turn of a rollout, and the pending reply."""

    request: tuple[object, ...]
    answer: asyncio.Task[Reply]


class RemoteEnvironment:
    """The environment of `[environment]`, in another process. Its errors are raised here."""

    def __init__(self, section: schema.Environment, search_paths: Sequence[str], log: Log) -> None:
        self.section = section
        # A link may lead elsewhere by the time a process is started again.
        self.search_paths = tuple(str(Path(path).expanduser().resolve()) for path in search_paths)
        self.log = log
        self._sources = read_all_sources(named_modules(section), self.search_paths)
        self.who = f"environment {section.id or section.provider!r}"
        self._splits: list[str] = []
        self._liveness = Liveness.create()
        self._starting = threading.Lock()
        self._opening = asyncio.Lock()
        self._opened: EnvironmentProcess | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._last_beat, self._beat_seen = 0.0, awake_s()
        self._blocked_s = 0.0
        self._blocked_since: float | None = None
        self.hangs = 0
        """How often its process was killed because it did not respond."""
        self._process: EnvironmentProcess | None = None
        self._ended = False
        try:
            self._running_process()
        except BaseException:
            self.end()
            raise

    def examples(self, split: str) -> Sequence[Example]:
        """The validated tasks of a split, fetched on access."""
        count, is_endless = self._call("split", split)
        if split not in self._splits:
            self._splits.append(split)
        if is_endless:
            return RemoteEndless(self, split)
        return Lazy(lambda place: self.fetch(split, None, (place,))[0], range(count))

    def fetch(self, split: str, seed: int | None, places: Sequence[int]) -> list[Example]:
        """Examples by index."""
        rows = self._call("items", split, seed, tuple(places))
        return [read_example(row, (split, seed, place)) for row, place in zip(rows, places, strict=True)]

    async def open(self) -> None:
        """Open the environment and start monitoring it."""
        await self._ready()
        self._monitor = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Close the environment and stop its process."""
        if self._monitor is not None:
            self._monitor.cancel()
        process = self._process
        if process is not None and process.is_alive and process is self._opened:
            answer = asyncio.wrap_future(process.call("close"))
            while not answer.done() and self._update_blocked() < _GONE_S:
                await asyncio.wait([answer], timeout=_POLL_S)
            if not answer.done():
                answer.cancel()
                self.log("The environment does not respond; its process was killed without closing it.")
            elif answer.result()["kind"] == "error":
                self.log(f"The environment could not be closed: {answer.result()['detail']}")
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Kill its process and descendants. A second call does nothing."""
        with self._starting:
            if not self._ended:
                self._ended = True
                if self._process is not None:
                    self._process.end()
                self._liveness.close()

    def blocked_s(self) -> float:
        """Total seconds in which the environment's event loop was blocked; never decreases."""
        since = self._blocked_since
        return self._blocked_s + (awake_s() - since if since is not None else 0.0)

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Run one example once; restarted if another rollout took the process down."""
        turns: list[_Turn] = []
        deaths = itertools.count()
        try:
            while True:
                outcome = await _Rollout(await self._ready(), chat, turns, deaths).play(example)
                if outcome is not None:
                    return outcome
        finally:
            for turn in turns:
                turn.answer.cancel()

    def _running_process(self) -> EnvironmentProcess:
        """The process, restarted if necessary."""
        with self._starting:
            if self._ended:
                raise RolloutError("the environment has ended.")
            if self._process is None:
                self._process = self._start(self.log)
            elif not self._process.is_alive:
                self._process.end()
                how = "its process did not respond" if self._process.was_unresponsive else self._process.end_text
                self.log(f"Restarting {self.who}: {how}")
                # Messages while loading were already printed the first time.
                self._process = self._start(lambda line: None)
                self._process.log = self.log
            return self._process

    def _start(self, log: Log) -> EnvironmentProcess:
        self._liveness.clear()
        start = Start(self.section, self.search_paths, tuple(self._splits), self._sources)
        process = EnvironmentProcess(start, self._liveness, log)
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

    def _call(self, kind: str, *arguments: object) -> Any:
        """Send a request and wait for the reply, in any thread but that of the rollouts."""
        process = self._running_process()
        reply = process.call(kind, *arguments).result()
        if reply["kind"] == "died":
            limit = f"its process did not respond for {self.section.timeout_s:g} s"
            how = limit if process.was_unresponsive else process.end_text
            raise PluginError(f"{self.who} returned no examples: {how}\n{process.last_lines()}".rstrip())
        return _read_result(reply, PluginError)

    async def _ready(self) -> EnvironmentProcess:
        """The process with the environment opened."""
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
        """Measure how long the event loop is blocked, and kill the process after `timeout_s`."""
        while True:
            await asyncio.sleep(_POLL_S)
            silent_s = self._update_blocked()
            process = self._opened
            if process is not None and process.is_alive and silent_s > self.section.timeout_s:
                self.hangs += 1
                await asyncio.to_thread(process.end_unresponsive)

    def _update_blocked(self) -> float:
        beat_at, now = self._liveness.beat_at, awake_s()
        if beat_at != self._last_beat:
            self._last_beat, self._beat_seen = beat_at, now
        if now - self._beat_seen > _BLOCKED_S:
            if self._blocked_since is None:
                self._blocked_since = self._beat_seen
        elif self._blocked_since is not None:
            self._blocked_s += now - self._blocked_since
            self._blocked_since = None
        return now - self._beat_seen


class _Rollout:
    """One attempt at a rollout, in one process. `turns` has those of earlier attempts and is extended."""

    def __init__(self, process: EnvironmentProcess, chat: Chat, turns: list[_Turn], deaths: Iterator[int]) -> None:
        self.process = process
        self.chat = chat
        self.turns = turns
        self.deaths = deaths
        """Counts the ends of a process in which no rollout ran."""
        self.taken = 0
        self.number = 0
        self.inbox: asyncio.Queue[WireReply] = asyncio.Queue()

    async def play(self, example: Example) -> Outcome | None:
        """The outcome; None when the process exited because of another rollout."""
        loop = asyncio.get_running_loop()

        def hear(reply: WireReply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
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

    def _answer(self, reply: WireReply) -> None:
        """Sample a reply to a turn, or repeat the reply of an earlier attempt."""
        request = (reply["method"], reply["messages"], reply["tools"])
        if self.taken == len(self.turns):
            ask = self.chat.ask if reply["method"] == "ask" else self.chat.reply_to
            answer = asyncio.ensure_future(ask(reply["messages"], reply["tools"]))
            self.turns.append(_Turn(request, answer))
        turn = self.turns[self.taken]
        self.taken += 1
        if turn.request != request:
            raise self._not_deterministic()
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

    def _finish(self, reply: WireReply) -> Outcome | None:
        if reply["kind"] == "died":
            self._raise_if_responsible()
            return None
        if self.taken < len(self.turns):
            raise self._not_deterministic()
        if reply["kind"] == "over":
            raise ChatOver(reply["detail"])
        if reply["kind"] == "error":
            raise restore_error(reply, RolloutError)
        return Outcome(reply["reward"], reply["metrics"], reply["truncated"])

    def _raise_if_responsible(self) -> None:
        """Raise if this rollout was running when the process exited, or if none was, as after a kill, several times."""
        process = self.process
        if process.suspects:
            is_innocent = self.number not in process.suspects
        else:
            is_innocent = not process.was_unresponsive and next(self.deaths) < _DEATHS
        if is_innocent:
            return
        where = f"\n{process.last_lines()}".rstrip()
        if process.was_unresponsive:
            raise RolloutTimeout(f"its process did not respond and was killed{where}")
        raise RolloutError(f"{process.end_text}{where}")

    def _not_deterministic(self) -> RolloutError:
        return RolloutError("the environment's process was restarted, and this rollout did not repeat its turns.")


def _read_result(reply: WireReply, unknown: type[RetrainError]) -> Any:
    if reply["kind"] == "error":
        raise restore_error(reply, unknown)
    return reply["value"]


class RemoteEndless(Endless):
    """An unlimited number of examples, generated in the environment's process."""

    def __init__(self, environment: RemoteEnvironment, split: str, seed: int = 0) -> None:
        super().__init__(_draw_nothing, seed)
        self._environment = environment
        self._split = split

    def reseed(self, seed: int) -> RemoteEndless:
        """The same source with another seed."""
        return RemoteEndless(self._environment, self._split, seed)

    def named(self, origin: str) -> RemoteEndless:
        """Unchanged: errors already name the environment."""
        return self

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return self._environment.fetch(self._split, self._seed, range(*index.indices(len(self))))
        if index < 0:
            raise IndexError("an unlimited source has no last example")
        return self._environment.fetch(self._split, self._seed, (index,))[0]


def _draw_nothing(rng: random.Random) -> Example:
    raise AssertionError("examples of a remote environment are generated in its process")
