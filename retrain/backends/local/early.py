"""Gradients of parts of a step, computed on a thread while the rest of the step is being sampled.

Parts are summed in the order of their numbers, so that the sum does not depend on which is done first: one that comes
early is held until those before it are there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from retrain.backends.local.learner import Learner, Part
from retrain.types import Datum

# Memory for parts that wait for earlier ones. Gradients of an adapter are far smaller; in full fine-tuning none fits,
# and parts are computed in order.
HELD_BYTES = 2 << 30


class EarlyGradients:
    """Computes parts in the background; on a GPU, in a separate stream from sampling."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.thread = ThreadPoolExecutor(1, "retrain-early")
        self.lock = threading.Lock()
        device = learner.policy.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.most_held = HELD_BYTES // sum(master.nbytes for master in learner.optimizer.masters)
        self._reset()

    def _reset(self) -> None:
        self.waiting: dict[int, Sequence[Datum]] = {}
        self.held: dict[int, Part | None] = {}
        """Parts that are done before an earlier one; None for one without rows."""
        self.summed = 0
        """Number of parts in `total`."""
        self.total: Part | None = None
        self.jobs: list[Future[None]] = []

    def add(self, number: int, datums: Sequence[Datum]) -> None:
        """Queue a part."""
        if self.stream is not None and not self.jobs:
            # The weights of this step are merged, and the memory of the last step is free.
            self.stream.wait_stream(torch.cuda.default_stream(self.learner.policy.device))
        with self.lock:
            self.waiting[number] = datums
        self.jobs.append(self.thread.submit(self._compute))

    def collect(self) -> Part | None:
        """Wait for all parts; returns their sum, or None if there were none."""
        try:
            for job in self.jobs:
                job.result()
            self._join_stream()
            return self.total
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop all parts; waits for the one that is being computed."""
        with self.lock:
            self.waiting.clear()
        wait(self.jobs)
        self._join_stream()
        self._reset()
        self.learner.optimizer.clear()

    def close(self) -> None:
        """End the thread."""
        self.discard()
        self.thread.shutdown()

    def _join_stream(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.learner.policy.device).wait_stream(self.stream)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def _compute(self) -> None:
        """Compute parts while one may be: the next in order, or another if it can be held."""
        with self._own_stream():
            while (found := self._take_one()) is not None:
                number, datums = found
                usable = [datum for datum in datums if datum.mask_T.any()]
                self.held[number] = self.learner.compute_part(usable) if usable else None
                while self.summed in self.held:
                    part = self.held.pop(self.summed)
                    self.summed += 1
                    if self.total is not None and part is not None:
                        self.total.add(part)
                    self.total = self.total or part

    def _take_one(self) -> tuple[int, Sequence[Datum]] | None:
        with self.lock:
            number = self.summed if self.summed in self.waiting else min(self.waiting, default=None)
            held = sum(part is not None for part in self.held.values())
            if number is None or (number != self.summed and held >= self.most_held):
                return None
            return number, self.waiting.pop(number)
