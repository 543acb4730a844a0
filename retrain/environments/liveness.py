"""A page of memory that the environment's process shares with the training process.

Code that holds the GIL can send no message. What is written here before it runs can be read while it hangs: when the
event loop last turned, and which rollouts were running, in the loop or in a thread.
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

# Numbers of eight bytes: the heartbeat, and from here on pairs of a rollout and the thread that works for it.
_PAGE = 4096
_LOOP = 2
_LOOK_S, _LEAST_S = 0.3, 0.005


class Liveness:
    """The page, on either side. A rollout is marked by its number, which is never 0."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _PAGE)
        self._beat = memoryview(self._memory).cast("d")
        self._marks = memoryview(self._memory).cast("q")
        self._free = list(range(_LOOP + 2, len(self._marks), 2))

    @classmethod
    def create(cls) -> Liveness:
        """A new page, whose `fd` the other process inherits."""
        fd, path = tempfile.mkstemp(prefix="retrain-environment-")
        os.unlink(path)
        os.ftruncate(fd, _PAGE)
        return cls(fd)

    @property
    def beat_at(self) -> float:
        """When the event loop last turned, on the clock of `time.monotonic`, which processes share."""
        return self._beat[0]

    def beat(self) -> None:
        """Show that the event loop turns."""
        self._beat[0] = time.monotonic()

    def running(self) -> set[int]:
        """The rollouts that were running when the other process last could say.

        Where a thread computes, the others only wait for it to let go of the GIL.
        """
        marks = {thread: rollout for rollout, thread in self._pairs() if rollout}
        before = {thread: _computed_s(thread) for thread in marks}
        time.sleep(_LOOK_S if len(marks) > 1 else 0)
        used = {thread: _computed_s(thread) - before[thread] for thread in marks}
        most = max(used.values(), default=0.0)
        # A thread that waits for the GIL looks for it now and then, which takes little.
        computing = [thread for thread in marks if used[thread] > most / 4 and most > _LEAST_S]
        return {marks[thread] for thread in computing or marks}

    def clear(self) -> None:
        """Forget the marks of a process that has ended."""
        for place in range(_LOOP, len(self._marks)):
            self._marks[place] = 0

    @contextmanager
    def in_loop(self, rollout: int) -> Iterator[None]:
        """Mark a rollout while the event loop runs a piece of it."""
        before = self._marks[_LOOP]
        self._marks[_LOOP + 1] = threading.get_native_id()
        self._marks[_LOOP] = rollout
        try:
            yield
        finally:
            self._marks[_LOOP] = before

    @contextmanager
    def in_thread(self, rollout: int) -> Iterator[None]:
        """Mark a rollout while a thread works for it; beyond some hundreds of threads there is no room."""
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
        """Give the page back."""
        os.close(self.fd)


def _computed_s(thread: int) -> float:
    """Seconds that a thread has spent on a processor; unknown, and so 0, where there is no /proc."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
