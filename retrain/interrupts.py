"""Ctrl-C and SIGTERM: stop at once between steps, or as soon as the step under way is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns both signals into KeyboardInterrupt, held back while `held` is open. Idle outside the main thread."""

    def __init__(self) -> None:
        self.holding = False
        self.waiting = False
        self.previous: dict[int, Any] = {}

    @property
    def between_steps(self) -> bool:
        """Whether the run stands at a step's boundary, where its state is whole."""
        return not self.holding

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.holding:
            self.waiting = True
        else:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Begin what `held` will go on with and end."""
        self.holding = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing in between. An error inside leaves `between_steps` false: the step is half done."""
        self.hold()
        yield
        self.holding = False
        if self.waiting:
            raise KeyboardInterrupt
