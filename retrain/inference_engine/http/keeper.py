"""Runs a command and ends it, with all that it started, when whoever started this file is gone.

A program of its own, of the standard library alone: `python keeper.py COMMAND ...`. Its standard input is a pipe that
the trainer holds. However the trainer ends, also by SIGKILL, the pipe is closed, and the command is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

# A server takes a while to end its own processes; what is still there afterwards is killed.
PATIENCE_S = 15.0


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the command to end, and kill what does not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def wait_for_the_end(server: subprocess.Popen[bytes]) -> None:
    """Nothing is ever written to the pipe; that reading ends means that it was closed."""
    os.read(0, 1)
    end(server)


def main() -> None:
    """Start the command, and exit as it does."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=wait_for_the_end, args=(server,), daemon=True).start()
    code = server.wait()
    # Its processes may outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
