"""Third-party code that stops its guard, and starts a process in a new session."""

from __future__ import annotations

import os
import signal
import subprocess
import time


def main() -> None:
    """Stop the guard, report the process, and wait."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGSTOP)
    os.write(1, f"{left.pid}\n".encode())
    time.sleep(600)
