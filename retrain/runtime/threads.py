"""Waiting of OpenMP threads, which PyTorch computes with on the CPU."""

from __future__ import annotations

import os


def limit_openmp_spinning() -> None:
    """Let idle OpenMP threads spin for about 20 µs instead of milliseconds, unless the user set a policy.

    A spinning thread takes the core away from the thread it waits for. On two shared cores this made sampling more
    than ten times slower. It has an effect only before PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
