"""A page of memory shared by the environment's process and the training process.

Code that holds the GIL cannot send messages. This page, written before such code runs, can be read while it hangs: the
last heartbeat of the event loop, and which rollouts were running, in the loop or in a thread.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Eight-byte numbers: the heartbeat, then pairs of a rollout and its thread.
_PAGE = 4096
_LOOP = 2
_SAMPLE_S, _MIN_BUSY_S = 0.3, 0.005


class Liveness:
    """The page, in either process. Rollout numbers are never 0."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _PAGE)
        self._beat = memoryview(self._memory).cast("d")
        self._marks = memoryview(self._memory).cast("q")
        self._free = list(range(_LOOP + 2, len(self._marks), 2))

    @classmethod
    def create(cls) -> Liveness:
        """Create a page; the other process inherits its `fd`."""
        fd, path = tempfile.mkstemp(prefix="retrain-environment-")
        os.unlink(path)
        os.ftruncate(fd, _PAGE)
        return cls(fd)

    @property
    def beat_at(self) -> float:
        """The last heartbeat, by `time.monotonic`, which is the same in all processes."""
        return self._beat[0]

    def beat(self) -> None:
        """Record a heartbeat of the event loop."""
        self._beat[0] = time.monotonic()

    def running(self) -> set[int]:
        """The rollouts that are running in the other process.

        If a thread uses the CPU, the others are only waiting for the GIL and are left out.
        """
        marks = {thread: rollout for rollout, thread in self._pairs() if rollout}
        before = {thread: _cpu_s(thread) for thread in marks}
        time.sleep(_SAMPLE_S if len(marks) > 1 else 0)
        used = {thread: _cpu_s(thread) - before[thread] for thread in marks}
        most = max(used.values(), default=0.0)
        # Waiting for the GIL takes little CPU time.
        computing = [thread for thread in marks if used[thread] > most / 4 and most > _MIN_BUSY_S]
        return {marks[thread] for thread in computing or marks}

    def clear(self) -> None:
        """Remove the marks of a process that has ended."""
        for place in range(_LOOP, len(self._marks)):
            self._marks[place] = 0

    @contextmanager
    def in_loop(self, rollout: int) -> Iterator[None]:
        """Mark a rollout while the event loop runs one of its steps."""
        before = self._marks[_LOOP]
        self._marks[_LOOP + 1] = threading.get_native_id()
        self._marks[_LOOP] = rollout
        try:
            yield
        finally:
            self._marks[_LOOP] = before

    @contextmanager
    def in_thread(self, rollout: int) -> Iterator[None]:
        """Mark a rollout while a thread works for it; the page has room for about 250 threads."""
        place = self._free.pop() if self._free else 0
        if not place:
            yield
            return
        self._marks[place + 1] = threading.get_native_id()
        self._marks[place] = rollout
        try:
            yield
        finally:
            self._marks[place] = 0
            self._free.append(place)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for place in range(_LOOP, len(self._marks), 2):
            yield self._marks[place], self._marks[place + 1]

    def close(self) -> None:
        """Close the page."""
        os.close(self.fd)


def _cpu_s(thread: int) -> float:
    """CPU seconds of a thread; 0 where there is no /proc."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
