"""Handles SIGINT, SIGTERM and SIGHUP: stops at once between steps, or when the running step is complete."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of an interrupted run."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Number of signals that interrupt even a deferring section.
FORCE_AFTER = 3


class Interrupts:
    """Turns signals into KeyboardInterrupt, deferred inside `deferring`. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self.holding = False
        self.stopping = False
        """Whether the run is stopping already; further signals are deferred."""
        self.waiting = 0
        """Signals received while holding or stopping."""
        self.previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def between_steps(self) -> bool:
        """Whether the run is between steps, where its state is consistent."""
        return not self.holding

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            # Started with nohup, the run must survive its terminal.
            wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.holding and not self.stopping:
            self.stopping = True
            raise KeyboardInterrupt
        self.waiting += 1
        if self.waiting >= FORCE_AFTER:
            raise KeyboardInterrupt
        if self.waiting == 1 and sys.__stderr__ is not None:
            # Not print: a signal may arrive during one. The terminal may be closed.
            with contextlib.suppress(OSError):
                os.write(2, b"\nFinishing the step and saving. Press Ctrl-C twice more to quit immediately.\n")

    def hold(self) -> None:
        """Start to defer signals, before `deferring` does."""
        self.holding = True

    def cancel(self) -> None:
        """Stop deferring: the step was undone and the state is that before it."""
        self.holding = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer signals. An error inside leaves `between_steps` false: the step is incomplete."""
        self.hold()
        yield
        self.stopping = self.stopping or self.waiting > 0
        self.holding = False
        if self.waiting:
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Defer signals during a section that must not be interrupted.

    Repeated signals interrupt it anyway. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) >= FORCE_AFTER:
            raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    # Ignored signals stay ignored.
    caught = {number: handler for number, handler in previous.items() if callable(handler)}
    for number in caught:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
    for which, frame in received:
        caught[signal.Signals(which)](which, frame)
