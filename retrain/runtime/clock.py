"""A clock for time limits of other people's code, which must not run out while nothing runs."""

from __future__ import annotations

import os
import threading
import time
from functools import cache

_TICK_S = 0.2
# A tick that is later than this was not late: the process was stopped.
_STOPPED_S = 1.0


def awake_s() -> float:
    """Seconds on a clock that stands still while this process does.

    It does when it is stopped, when its job is suspended, and when its machine is paused.
    Readings of two processes cannot be compared.
    """
    return _clock_of(os.getpid()).read()


class _Clock:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped_s = 0.0
        self.read_at, self.used_s = time.monotonic(), time.process_time()
        threading.Thread(target=self._tick, name="retrain-clock", daemon=True).start()

    def read(self) -> float:
        with self.lock:
            now, used_s = time.monotonic(), time.process_time()
            passed_s, computed_s = now - self.read_at, used_s - self.used_s
            self.read_at, self.used_s = now, used_s
            if passed_s > _STOPPED_S:
                # Code that holds the GIL makes ticks late, too, but it computes meanwhile.
                self.stopped_s += passed_s - min(max(computed_s, _TICK_S), passed_s)
            return now - self.stopped_s

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.read()


@cache
def _clock_of(pid: int) -> _Clock:
    return _Clock()  # threads do not survive a fork
