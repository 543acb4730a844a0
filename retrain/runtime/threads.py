"""Threads that share a model, and waiting of OpenMP threads, which PyTorch computes with on the CPU."""

from __future__ import annotations

import os
import threading
from collections import deque


def limit_openmp_spinning() -> None:
    """Let idle OpenMP threads spin for about 20 µs instead of milliseconds, unless the user set a policy.

    A spinning thread takes the core away from the thread it waits for. On two shared cores this made sampling more
    than ten times slower. It has an effect only before PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


class FairLock:
    """A reentrant lock that threads get in the order in which they asked for it.

    With a plain lock, a thread that releases it and asks again at once would keep the others waiting.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[int] = deque()
        """Threads that have the lock or wait for it; the first has it."""
        self.depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self.changed:
            if self.depth and self.queue[0] == me:
                self.depth += 1
                return
            self.queue.append(me)
            try:
                self.changed.wait_for(lambda: self.queue[0] == me)
            except BaseException:
                self.queue.remove(me)
                self.changed.notify_all()
                raise
            self.depth = 1

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.depth -= 1
            if not self.depth:
                self.queue.popleft()
                self.changed.notify_all()

    def __deepcopy__(self, memo: object) -> FairLock:
        return FairLock()
