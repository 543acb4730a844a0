"""A counting semaphore on disk that limits concurrent Tinker calls of runs that share a folder.

A slot is a locked file. The kernel releases the lock when its holder exits, so no slot is ever lost. Waiting processes
queue behind another lock, and only the first of them polls for a free slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.errors import ConfigError

# Polling interval. A Tinker call takes seconds, so the delay does not matter.
_POLL_S = 0.01
_NOTIFY_AFTER_S = 5.0


class Throttle:
    """At most `slots` concurrent holders of `slot()`, over all processes and threads that use the same folder."""

    def __init__(self, folder: str, slots: int, log: Callable[[str], None]) -> None:
        self.folder = Path(folder).expanduser() if folder else default_folder()
        self.slots = slots
        self.log = log
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.close(self._open("line"))
        except OSError as error:
            raise ConfigError(
                f"[backend] throttle_dir = {str(self.folder)!r} cannot be written to: {error.strerror}.  "
                "Try: a folder of your own"
            ) from error

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Acquire a slot, waiting if necessary, and release it on exit."""
        held = self._take()
        try:
            yield
        finally:
            os.close(held)

    def _take(self) -> int:
        # Fairness: queue if others are waiting, even if a slot is free at the moment.
        queue = self._open("line")
        began = time.monotonic()
        try:
            if not _lock(queue, wait=False):
                _lock(queue, wait=True)
            notified = False
            while (held := self._find_free()) is None:
                if not notified and time.monotonic() - began > _NOTIFY_AFTER_S:
                    notified = True
                    self.log(f"Waiting for other runs: [backend] max_concurrent = {self.slots} are in a Tinker call.")
                time.sleep(_POLL_S)
            return held
        finally:
            os.close(queue)

    def _find_free(self) -> int | None:
        for number in range(self.slots):
            descriptor = self._open(f"slot_{number}")
            if _lock(descriptor, wait=False):
                return descriptor
            os.close(descriptor)
        return None

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def default_folder() -> Path:
    """A folder per user in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"retrain_tinker_{os.getuid()}"


def _lock(descriptor: int, wait: bool) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False
