"""`retrain` as the process of a campaign's run: when whoever started it dies, it is told to save and end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from retrain import cli

# From Linux's sys/prctl.h: the signal to receive when the parent ends.
_PR_SET_PDEATHSIG = 1
# Whoever starts this process says who it is: dead already, it would be taken for whoever adopted us.
PARENT = "RETRAIN_PARENT"


def end_with_parent() -> None:
    """Ask for SIGTERM at the parent's death. Where the system has no such thing, runs end by themselves."""
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            # It died before we could ask.
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """`retrain` with the arguments of this process."""
    end_with_parent()
    cli.main()
