"""A counting semaphore on disk: runs that share a folder are never more than so many in a Tinker call at once.

A slot is a locked file. The kernel lets go of the lock when its holder ends, however it ends, so no slot is ever lost.
Those who wait stand in line behind one more lock, and only the first of them looks for a free slot.
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

# The first in line looks this often. A Tinker call takes seconds, so the delay is not felt.
_LOOK_EVERY_S = 0.01
_SAY_AFTER_S = 5.0


class Throttle:
    """At most `slots` holders of `slot()` at a time, over all processes and threads that name the same folder."""

    def __init__(self, folder: str, slots: int, say: Callable[[str], None]) -> None:
        self.folder = Path(folder).expanduser() if folder else default_folder()
        self.slots = slots
        self.say = say
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
        """Hold a slot; waits for one."""
        held = self._take()
        try:
            yield
        finally:
            os.close(held)

    def _take(self) -> int:
        # Whoever comes when others stand in line joins it, even if a slot is free this instant.
        line = self._open("line")
        began = time.monotonic()
        try:
            if not _lock(line, wait=False):
                _lock(line, wait=True)
            told = False
            while (held := self._find_free()) is None:
                if not told and time.monotonic() - began > _SAY_AFTER_S:
                    told = True
                    self.say(f"Waiting for other runs: [backend] max_concurrent = {self.slots} are in a Tinker call.")
                time.sleep(_LOOK_EVERY_S)
            return held
        finally:
            os.close(line)

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
    """One folder a user in the system's temporary one."""
    return Path(tempfile.gettempdir()) / f"retrain_tinker_{os.getuid()}"


def _lock(descriptor: int, wait: bool) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False
