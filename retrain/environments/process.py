"""The training process's side of the environment's process: requests, replies, and its exit.

Three threads serve its pipes, so that neither a full pipe nor a hanging process blocks the training process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from queue import SimpleQueue

from retrain.environments import Log
from retrain.environments.liveness import Liveness
from retrain.environments.wire import Request, Start, WireReply, pack_request
from retrain.isolation.framing import FrameBuffer
from retrain.isolation.guard import GuardedProcess
from retrain.isolation.redaction import redact

Listener = Callable[[WireReply], None]

_READ_BYTES = 1 << 16
_JOIN_S = 2.0
_KEPT_LINES = 60
_SHOWN_LINES = 12
_GOLDEN_RATIO = 0.618
_LONGEST_LINE = 2000
_OWN_FOLDER = str(Path(__file__).parent)
# Frames below those of the environment.
_MACHINERY = re.compile(r'File "(?:<string>|<frozen |.*/(?:asyncio|concurrent/futures)/|.*/threading\.py)')


class EnvironmentProcess:
    """One process. Each listener receives its replies, and `died` when the process has exited."""

    def __init__(self, start: Start, liveness: Liveness, log: Log) -> None:
        self.is_alive = True
        self.suspects: set[int] = set()
        """The rollouts that were running when it exited."""
        self.end_text = ""
        """How it exited."""
        self.was_unresponsive = False
        self._liveness = liveness
        self.log = log
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._numbers = itertools.count(1)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self.started: Future[WireReply] = Future()
        """The first reply: `ready`, `failed` or `died`."""
        self._listeners[0] = self._on_control
        printed, output = os.pipe()
        try:
            self._guarded = GuardedProcess(
                "retrain.environments.worker", output, os.environ, (liveness.fd,), str(liveness.fd)
            )
        finally:
            os.close(output)
        self._threads = [
            threading.Thread(target=work, args=arguments, name="environment-pipes", daemon=True)
            for work, arguments in ((self._read, ()), (self._write, ()), (self._relay, (printed,)))
        ]
        for thread in self._threads:
            thread.start()
        self._outbox.put(pack_request(start))

    def listen(self, listener: Listener) -> int:
        """A new number whose replies go to `listener`, in the reading thread."""
        with self._lock:
            number = next(self._numbers)
            if self.is_alive:
                self._listeners[number] = listener
                return number
        listener({"kind": "died"})
        return number

    def forget(self, number: int) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.pop(number, None)

    def send(self, kind: str, number: int, *arguments: object) -> None:
        """Send a request; never blocks."""
        self._outbox.put(pack_request(Request(kind, number, arguments)))

    def call(self, kind: str, *arguments: object) -> Future[WireReply]:
        """Send a request that has one reply."""
        answer: Future[WireReply] = Future()
        number = self.listen(lambda reply: _settle(answer, reply))
        answer.add_done_callback(lambda _: self.forget(number))
        self.send(kind, number, *arguments)
        return answer

    def end_unresponsive(self) -> None:
        """Kill it because it does not respond; the rollouts that were running failed."""
        self.was_unresponsive = True
        self.suspects = self._liveness.running()
        self._guarded.abort()
        self.end()

    def end(self) -> None:
        """Kill it and its descendants."""
        self._outbox.put(None)
        self._guarded.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._guarded.close()

    def _on_control(self, reply: WireReply) -> None:
        if reply["kind"] == "log":
            self.log(redact(reply["text"]))
        elif not self.started.done():
            self.started.set_result(reply)

    def _read(self) -> None:
        frames = FrameBuffer()
        try:
            # The environment's code shares a process with the sender: bytes that are not a reply end it.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                while data := os.read(self._guarded.replies.fileno(), _READ_BYTES):
                    for body in frames.feed(data):
                        self._dispatch(json.loads(body))
        finally:
            self._on_exit()

    def _dispatch(self, reply: WireReply) -> None:
        with self._lock:
            listener = self._listeners.get(reply["number"])
        if listener is not None:
            listener(reply)

    def _on_exit(self) -> None:
        code = self._guarded.stop()
        self._threads[-1].join(_JOIN_S)
        self.suspects = self.suspects or self._liveness.running()
        if code < 0:
            self.end_text = f"its process died: {signal.strsignal(-code)}"
        else:
            self.end_text = f"its process exited with status {code}"
        with self._lock:
            self.is_alive = False
            # Rollouts are restarted in this order. Those of one problem are next to each other and may all hang, so the
            # next ones to get a turn are far from these, and from those of the time before.
            listeners = list(self._listeners.values())
            first = int(len(listeners) * _GOLDEN_RATIO)
            listeners = listeners[first:] + listeners[:first]
            self._listeners.clear()
        for listener in listeners:
            listener({"kind": "died"})

    def last_lines(self) -> str:
        """The last output of an exited process, including its stack."""
        lines = [line for line in self._printed if not _is_noise(line)]
        return "\n".join(lines[-_SHOWN_LINES:])

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reading thread notices the exit
            while (message := self._outbox.get()) is not None:
                rest = memoryview(message)
                while rest:
                    rest = rest[os.write(self._guarded.requests.fileno(), rest) :]

    def _relay(self, printed: int) -> None:
        """Forward the environment's output; of a progress bar only the last state."""
        with os.fdopen(printed, encoding="utf-8", errors="backslashreplace", newline="\n") as lines:
            for line in lines:
                text = redact(line.rstrip("\r\n").rpartition("\r")[2])[:_LONGEST_LINE]
                self._printed.append(text)
                if not self.was_unresponsive:
                    self.log(text)


def _settle(answer: Future[WireReply], reply: WireReply) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller has given up
        answer.set_result(reply)


def _is_noise(line: str) -> bool:
    """Whether a line is one of our frames or part of the interpreter's crash report."""
    if line.startswith("  File "):
        return _OWN_FOLDER in line or _MACHINERY.search(line) is not None
    crash = ("Fatal Python error: ", "Extension modules: ", "Thread 0x", "Current thread")
    return not line.strip() or line.startswith(crash)
