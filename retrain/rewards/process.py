"""The pool's side of a worker process: its pipes, assigned items, and exit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import tempfile
from collections import deque
from collections.abc import Sequence

from retrain.errors import PluginError
from retrain.isolation.guard import GuardedProcess
from retrain.isolation.redaction import public_environment
from retrain.rewards.wire import Item, Reply, ReplyBuffer, Start, Work, pack_request, read_tail
from retrain.runtime.clock import awake_s

# One core per worker; a fixed hash seed, so that scores do not depend on the worker.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

# Items are sent in chunks to reduce overhead for cheap rewards. A chunk that takes longer than this is not enlarged,
# because its items could not move to an idle worker.
_QUICK_CHUNK_S = 0.02
_LARGEST_CHUNK = 64

_READ_BYTES = 1 << 16
_SHOWN_LINES = 20
_LARGEST_OUTPUT = 1 << 24


class WorkerProcess:
    """A process running `retrain.rewards.worker`. Its pipes never block the parent."""

    def __init__(self, start: Start) -> None:
        self._output, path = tempfile.mkstemp(prefix="retrain-reward-")
        os.unlink(path)  # the open descriptor keeps it; nothing is left if the parent is killed
        # Both sides truncate this file while the other may write; appending avoids holes.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND | os.O_RDWR)
        environment = {**public_environment(start.pass_env), **_ENVIRONMENT}
        self._process = GuardedProcess("retrain.rewards.worker", self._output, environment)
        self.requests_fd = self._process.requests.fileno()
        self.replies_fd = self._process.replies.fileno()
        os.set_blocking(self.requests_fd, False)
        os.set_blocking(self.replies_fd, False)
        self._outbox = memoryview(b"")
        self._replies = ReplyBuffer()
        self._extras: tuple[str, ...] = ()
        self._chunk_size, self._chunk_began = 0, 0.0
        self._answered = 0
        self.ready = False
        self.chunk = 1
        """Number of items to send next."""
        self.assigned: deque[int] = deque()
        """Indices of unfinished items; it works on the first."""
        self.since = awake_s()
        """Start time of the current activity: starting up, or the first assigned item."""
        self._printed, self._code = "", 0
        self._post(pack_request(start))
        self.flush()

    def assign(self, indices: Sequence[int], items: Sequence[Item]) -> None:
        """Assign items; `flush` sends them."""
        rows = tuple((item.response, item.reference, self._extras_of(item)) for item in items)
        try:
            message = pack_request(Work(rows, first=self._answered + len(self.assigned)))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise PluginError(f"the meta of an example cannot be sent to the reward: {error}") from error
        self.assigned.extend(indices)
        self.since = self._chunk_began = awake_s()
        self._chunk_size = len(indices)
        self._post(message)

    def _extras_of(self, item: Item) -> dict[str, object]:
        known: dict[str, object] = {"prompt": item.prompt, "meta": dict(item.meta) if "meta" in self._extras else {}}
        return {name: known[name] for name in self._extras}

    def _post(self, message: bytes) -> None:
        self._outbox = memoryview(message)

    def flush(self) -> bool:
        """Send what fits; True while data is left."""
        # A dead worker is noticed when its replies are read.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outbox:
                self._outbox = self._outbox[os.write(self.requests_fd, self._outbox) :]
        return len(self._outbox) > 0

    def has_replied(self) -> bool:
        """Whether a reply or end-of-file can be read."""
        return bool(select.select([self.replies_fd], [], [], 0)[0])

    def has_exited(self) -> bool:
        """Whether the process has ended. What it forked may keep the pipe open a little longer."""
        return self._process.process.poll() is not None

    def receive(self) -> list[Reply] | None:
        """Read available replies; None when the worker has closed the pipe."""
        data = os.read(self.replies_fd, _READ_BYTES)
        if not data:
            return None
        return list(self._replies.feed(data))

    def begin(self, extras: tuple[str, ...]) -> None:
        """Mark the worker as ready, with the extras its reward takes."""
        self.ready, self._extras = True, extras

    def expects(self, reply: Reply) -> bool:
        """Whether a reply belongs to the current item. A process that the reward forked may send others."""
        return len(self.assigned) > 0 and reply.kind in ("value", "none", "error") and reply.number == self._answered

    def finish_item(self) -> int:
        """Finish the current item and return its index."""
        self.since = awake_s()
        index = self.assigned.popleft()
        self._answered += 1
        if not self.assigned:
            quick = self.since - self._chunk_began < _QUICK_CHUNK_S
            self.chunk = min(2 * self._chunk_size, _LARGEST_CHUNK) if quick else max(1, self._chunk_size // 2)
        return index

    def trim_output(self) -> None:
        """Truncate excessive output."""
        if os.fstat(self._output).st_size > _LARGEST_OUTPUT:
            os.ftruncate(self._output, 0)

    def abort(self) -> None:
        """Make the worker print its stack and exit."""
        self._process.abort()

    def kill(self) -> None:
        """Kill the worker with its descendants and close the pipes. Its output stays readable."""
        self._code = self._process.end()
        self._printed = read_tail(self._output)
        os.close(self._output)

    def describe_end(self) -> str:
        """How a worker exited, with its last output."""
        code = self._code
        if code < 0:
            hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
            how = f"the reward process died: {signal.strsignal(-code)}{hint}"
        else:
            how = f"the reward process exited with status {code}"
        return f"{how}\n{self.last_output()}".rstrip()

    def last_output(self) -> str:
        """The last output of an exited worker, including its stack."""
        lines = [line for line in self._printed.splitlines() if not _is_noise(line)]
        return "\n".join(lines[-_SHOWN_LINES:])


def _is_noise(line: str) -> bool:
    """Whether a line is one of our frames or part of the interpreter's crash report."""
    if line.startswith("  File "):
        return os.path.dirname(__file__) in line or '"<string>"' in line
    return not line.strip() or line.startswith(("Fatal Python error: ", "Extension modules: "))
