"""Stopping processes for a while, as a scheduler that suspends jobs or the host of a virtual machine does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@contextmanager
def pause(seconds: float, after_s: float) -> Iterator[None]:
    """Stop this process and all it has started after a while; this one continues first."""
    before = _descendants(os.getpid())
    others = " ".join(map(str, before))
    script = (
        f"sleep {after_s}; kill -STOP {os.getpid()} {others}; sleep {seconds}; "
        f"kill -CONT {os.getpid()}; sleep 0.3; kill -CONT {others}"
    )
    with subprocess.Popen(["sh", "-c", script], start_new_session=True):
        yield


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children")]
    return [*children, *(each for child in children for each in _descendants(child))]


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it has ended
        return []
