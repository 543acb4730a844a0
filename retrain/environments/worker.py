"""The process that runs an environment: its examples, rollouts and scoring, under a guard process.

It exchanges only messages; tokens, templates and the model stay in the training process. The environment's code owns
file descriptors 0, 1 and 2 here: no input, and output goes to the console of the training process.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from retrain.data import Endless
from retrain.environments import (
    ChatOver,
    Environment,
    ManagedEnvironment,
    Message,
    Reply,
    Tool,
    as_messages,
    build_environment,
    load_split,
    run_rollout,
)
from retrain.environments.chat import clean
from retrain.environments.liveness import Liveness
from retrain.environments.wire import (
    Request,
    Start,
    error_fields,
    example_fields,
    outcome_fields,
    pack_reply,
    read_reply,
    turn_fields,
)
from retrain.errors import PluginError, RolloutError
from retrain.isolation.framing import FrameBuffer, PipeWriter
from retrain.isolation.sources import import_as_read
from retrain.types import Example

Work = Coroutine[object, object, object]
T = TypeVar("T")
_READ_BYTES = 1 << 16
_BEAT_S = 0.2

_rollout: contextvars.ContextVar[int] = contextvars.ContextVar("rollout", default=0)
"""The rollout number of a task or thread."""


def main() -> None:
    """Build the environment and serve the training process until it closes the pipe."""
    requests, replies = Requests(os.dup(0)), Replies(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # A hanging process is killed with SIGABRT, so that this prints its stack.
    faulthandler.enable(file=2, all_threads=True)
    start = requests.next()
    assert isinstance(start, Start)
    try:
        worker = EnvironmentWorker(start, replies)
    except BaseException as error:
        replies.send("failed", 0, **error_fields(error))
        return
    asyncio.run(worker.serve(requests, Liveness(int(sys.argv[3]))))


class Requests:
    """Requests of the training process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._frames = FrameBuffer()
        self._waiting: list[Start | Request] = []

    def read(self) -> list[Start | Request]:
        """Requests that have arrived; exits when the training process has exited."""
        data = os.read(self.fd, _READ_BYTES)
        if not data:
            os._exit(0)
        return [pickle.loads(body) for body in self._frames.feed(data)]

    def next(self) -> Start | Request:
        """Wait for a request."""
        while not self._waiting:
            self._waiting += self.read()
        return self._waiting.pop(0)


class Replies(PipeWriter):
    """Sends replies."""

    def send(self, kind: str, number: int = 0, **fields: object) -> None:
        """Write a reply."""
        self.write(pack_reply(kind, number, **fields))

    def log(self, line: str) -> None:
        """Print a line on the console of the training process."""
        self.send("log", text=str(line))


class EnvironmentWorker:
    """The environment, its examples, and the running rollouts."""

    def __init__(self, start: Start, replies: Replies) -> None:
        self.section = start.section
        self.replies = replies
        import_as_read(start.sources)
        # Processes that the environment starts, such as servers of tools, import the same modules.
        paths = [str(Path(path).expanduser().resolve()) for path in start.search_paths]
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment: Environment = build_environment(start.section, start.search_paths, replies.log)
        self.splits: dict[str, Sequence[Example]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: dict[int, asyncio.Future[tuple[object, ...]]] = {}
        self.turns: Iterator[int] = itertools.count(1)
        for split in start.splits:
            self._load(split)

    async def serve(self, requests: Requests, liveness: Liveness) -> None:
        """Serve requests until the training process exits."""
        loop = asyncio.get_running_loop()
        mark_tasks(loop, liveness)
        mark_threads(liveness)
        liveness.beat()
        self.replies.send("ready")
        loop.add_reader(requests.fd, self._handle_all, requests)
        while True:
            liveness.beat()
            await asyncio.sleep(_BEAT_S)

    def _handle_all(self, requests: Requests) -> None:
        for request in requests.read():
            self._handle(request)

    def _handle(self, request: Start | Request) -> None:
        assert isinstance(request, Request)
        if request.kind == "answer":
            self._deliver(request.number, request.arguments)
        elif request.kind == "cancel":
            if request.number in self.tasks:
                self.tasks[request.number].cancel()
        else:
            work = self._play if request.kind == "play" else self._answer
            context = contextvars.copy_context()
            context.run(_rollout.set, request.number if request.kind == "play" else 0)
            self.tasks[request.number] = asyncio.get_running_loop().create_task(work(request), context=context)

    def _deliver(self, turn: int, arguments: tuple[object, ...]) -> None:
        answer = self.answers.pop(turn, None)
        if answer is not None:
            # An environment may call the model from another event loop in another thread.
            answer.get_loop().call_soon_threadsafe(_resolve, answer, arguments)

    async def _answer(self, request: Request) -> None:
        """Handle a request other than a rollout."""
        try:
            self.replies.send("result", request.number, value=await self._do(request.kind, *request.arguments))
        except BaseException as error:
            self.replies.send("error", request.number, **error_fields(error))
        finally:
            del self.tasks[request.number]

    async def _do(self, kind: str, *arguments: Any) -> Any:
        if kind == "split":
            examples = self._load(*arguments)
            return len(examples), isinstance(examples, Endless)
        if kind == "items":
            split, seed, places = arguments
            return [await self._item(split, seed, place) for place in places]
        if isinstance(self.environment, ManagedEnvironment):
            await (self.environment.open() if kind == "open" else self.environment.close())
        return None

    async def _item(self, split: str, seed: int | None, place: int) -> list[object]:
        await asyncio.sleep(0)  # some are generated slowly: allow heartbeats in between
        return example_fields(self._example(split, seed, place))

    def _load(self, split: str) -> Sequence[Example]:
        if split not in self.splits:
            self.splits[split] = load_split(self.environment, self.section, split)
        return self.splits[split]

    def _example(self, split: str, seed: int | None, place: int) -> Example:
        examples = self._load(split)
        if seed is not None and isinstance(examples, Endless):
            examples = examples.reseed(seed)
        example: object = examples[place]
        if not isinstance(example, Example):
            raise PluginError(f"the environment returned {type(example).__name__} for example {place} of {split!r}.")
        return example

    async def _play(self, request: Request) -> None:
        """Run one rollout, whatever the environment raises."""
        number, (place, seed) = request.number, request.arguments
        try:
            chat = WorkerChat(self, number, seed)
            outcome = outcome_fields(await run_rollout(self.environment, self._example(*place), chat))
            self.replies.send("outcome", number, **outcome)
        except ChatOver as over:
            self.replies.send("over", number, detail=str(over))
        except BaseException as error:
            # SystemExit and the like must not stop the event loop and all other rollouts.
            self.replies.send("error", number, **error_fields(error))
        finally:
            del self.tasks[number]


class WorkerChat:
    """The `Chat` of a rollout: each turn is a request to the training process."""

    def __init__(self, worker: EnvironmentWorker, rollout: int, seed: int) -> None:
        self.worker = worker
        self.rollout = rollout
        self.seed = seed

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Add messages and return the model's reply."""
        return await self._turn("ask", as_messages(new), tools)

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Reply to a complete history."""
        return await self._turn("reply_to", history, tools)

    async def _turn(self, method: str, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        fields = turn_fields([clean(message) for message in messages], tools)
        turn = next(self.worker.turns)
        answer = self.worker.answers[turn] = asyncio.get_running_loop().create_future()
        try:
            self.worker.replies.send("turn", self.rollout, turn=turn, method=method, **fields)
        except (TypeError, ValueError, RecursionError) as error:
            raise RolloutError(f"the environment sent a message that is not plain data: {error}") from error
        try:
            kind, *values = await answer
        finally:
            self.worker.answers.pop(turn, None)
        if kind == "over":
            raise ChatOver(*values)
        if kind == "error":
            raise RolloutError(*values)
        return read_reply(*values)


def _resolve(answer: asyncio.Future[tuple[object, ...]], arguments: tuple[object, ...]) -> None:
    if not answer.done():
        answer.set_result(arguments)


def mark_tasks(loop: asyncio.AbstractEventLoop, liveness: Liveness) -> None:
    """Mark every step of a rollout's tasks while it runs, so that a hanging rollout can be identified."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Work, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context") or contextvars.copy_context()
        number = context.get(_rollout, 0)
        return asyncio.Task(_marked(coroutine, number, liveness) if number else coroutine, loop=loop, **options)

    # Any: its declared signature differs between Python versions.
    factory: Any = make
    loop.set_task_factory(factory)


def mark_threads(liveness: Liveness) -> None:
    """The same for work that a rollout submits to thread pools."""
    submit = ThreadPoolExecutor.submit

    def marked(pool: ThreadPoolExecutor, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        number = _rollout.get()

        def run() -> T:
            with liveness.in_thread(number):
                return function(*args, **kwargs)

        return submit(pool, run) if number else submit(pool, function, *args, **kwargs)

    ThreadPoolExecutor.submit = marked  # type: ignore[assignment,method-assign]


async def _marked(coroutine: Work, number: int, liveness: Liveness) -> object:
    return await _Steps(coroutine, number, liveness)


class _Steps(Generator[object, object, object]):
    """A coroutine that marks its rollout during each of its steps."""

    def __init__(self, coroutine: Work, number: int, liveness: Liveness) -> None:
        self._coroutine = coroutine
        self._number = number
        self._liveness = liveness

    def __await__(self) -> Generator[object, object, object]:
        return self

    def send(self, value: object) -> object:
        with self._liveness.in_loop(self._number):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> object:
        with self._liveness.in_loop(self._number):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()
