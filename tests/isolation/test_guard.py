"""Guarded processes whose guard is stopped by the code it guards. Other attacks: tests/rewards/test_sandbox.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from retrain.isolation.guard import GuardedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")

_TRAINING = """import os, sys, time
from retrain.isolation.guard import GuardedProcess
guarded = GuardedProcess("tests.isolation.stopper", 2, dict(os.environ))
print(guarded.replies.readline().decode(), guarded.process.pid, flush=True)
time.sleep(600)"""


def _has_ended(pid: int) -> bool:
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_stopped_guard_still_ends_everything() -> None:
    guarded = GuardedProcess("tests.isolation.stopper", 2, dict(os.environ))
    left = int(guarded.replies.readline())
    began = time.monotonic()
    guarded.end()
    assert time.monotonic() - began < 5.0  # the guard acted; it was not killed at its time limit
    assert _has_ended(left)


def test_a_stopped_guard_ends_everything_when_the_training_process_is_killed() -> None:
    training = subprocess.Popen([sys.executable, "-c", _TRAINING], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    left, guard = map(int, (training.stdout.readline() + training.stdout.readline()).split())
    training.send_signal(signal.SIGKILL)
    training.wait()
    training.stdout.close()
    assert _has_ended(guard)
    assert _has_ended(left)
