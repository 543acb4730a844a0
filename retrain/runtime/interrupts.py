"""Ctrl-C, SIGTERM and a closed terminal: stop at once between steps, or as soon as the step under way is whole."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that end even what should not be interrupted: somebody really means it.
INSISTING = 3


class Interrupts:
    """Turns signals into KeyboardInterrupt, held back while `held` is open. Idle outside the main thread."""

    def __init__(self) -> None:
        self.holding = False
        self.stopping = False
        """Whether the run was told to stop already: what it does about that is held too."""
        self.waiting = 0
        """Signals that came while holding or stopping."""
        self.previous: dict[int, Any] = {}

    @property
    def between_steps(self) -> bool:
        """Whether the run stands at a step's boundary, where its state is whole."""
        return not self.holding

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            # Whoever started it with nohup wants it to outlive the terminal.
            wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.holding and not self.stopping:
            self.stopping = True
            raise KeyboardInterrupt
        self.waiting += 1
        if self.waiting >= INSISTING:
            raise KeyboardInterrupt
        if self.waiting == 1 and sys.__stderr__ is not None:
            # Not print: a signal may arrive in the middle of one. A terminal that was closed takes nothing any more.
            with contextlib.suppress(OSError):
                os.write(2, b"\nFinishing and saving; twice more stops at once.\n")

    def hold(self) -> None:
        """Begin what `held` will go on with and end."""
        self.holding = True

    def give_up(self) -> None:
        """What was held never happened: the state is that of the boundary before it."""
        self.holding = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing in between. An error inside leaves `between_steps` false: the step is half done."""
        self.hold()
        yield
        self.stopping = self.stopping or self.waiting > 0
        self.holding = False
        if self.waiting:
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Let signals wait until this is over: what they would cut in two others could not put together again.

    Whoever insists is let through. Idle outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) >= INSISTING:
            raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    # What is ignored stays so.
    caught = {number: handler for number, handler in previous.items() if callable(handler)}
    for number in caught:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
    for which, frame in came:
        caught[signal.Signals(which)](which, frame)
