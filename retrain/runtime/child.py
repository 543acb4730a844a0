"""`retrain` as the child of a campaign or a launcher: when whoever started it dies, it is told to save and end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# From Linux's sys/prctl.h: the signal to receive when the parent ends.
_PR_SET_PDEATHSIG = 1
# Set by whoever starts this process: if it is dead already, our parent is whoever adopted us.
PARENT = "RETRAIN_PARENT"
CHILD = ("-m", "retrain")


def end_with_parent() -> None:
    """Ask for SIGTERM at the parent's death, where a parent asked for it and the system can."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            # It died before we could ask.
            os.kill(os.getpid(), signal.SIGTERM)
