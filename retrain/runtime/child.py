"""`retrain` as a child process of a campaign or launcher: when the parent dies, it saves and ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# From Linux's sys/prctl.h: the signal to receive when the parent ends.
_PR_SET_PDEATHSIG = 1
# Set by the parent: if it has died already, our parent process is another one.
PARENT = "RETRAIN_PARENT"
CHILD = ("-m", "retrain")


def python_command() -> list[str]:
    """Python for a process that imports as this one does.

    By itself, it would look for Python's own modules in the working directory first, where the user's files are.
    """
    # As it did in this process, if that was started with -m.
    is_first = vars(sys.modules["__main__"]).get("__spec__") is not None and not sys.flags.safe_path
    return [sys.executable] if is_first else [sys.executable, "-P"]


def end_with_parent() -> None:
    """Request SIGTERM when the parent dies, if it set `PARENT` and the system supports it."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None and sys.platform == "linux":
        signal_on_parent_death(int(parent), signal.SIGTERM)


def signal_on_parent_death(parent: int, number: int) -> None:
    """Request this signal for the time when the parent dies, or send it if it has died already. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
