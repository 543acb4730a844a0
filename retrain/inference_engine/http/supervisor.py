"""Runs a command and terminates it, with all its child processes, when the parent process exits.

Standalone, standard library only: `python supervisor.py COMMAND ...`. Its standard input is a pipe held by the trainer.
However the trainer ends, even by SIGKILL, the pipe closes and the command is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

# Time for a server to stop its own processes; the rest is killed.
GRACE_S = 15.0


def end(server: subprocess.Popen[bytes]) -> None:
    """Terminate the command, then kill what remains."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def wait_for_the_end(server: subprocess.Popen[bytes]) -> None:
    """Wait until the pipe is closed; nothing is ever written to it."""
    os.read(0, 1)
    end(server)


def main() -> None:
    """Run the command and exit with its code."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=wait_for_the_end, args=(server,), daemon=True).start()
    code = server.wait()
    # Its child processes may outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
