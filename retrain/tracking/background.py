"""A tracker that talks to something slow or far away: it works in a thread, and what it cannot take is dropped.

Training waits a moment for it to begin, so that a wrong project is said at once, and a moment for it to end; at no
other time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.tracking import Tracker
from retrain.types import Group, StepMetrics

START_S = 15.0
FINISH_S = 20.0
# Steps that may wait to be sent.
ROOM = 1000


class InBackground:
    """Runs another tracker in a thread of its own."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self.name = name
        self.tracker = tracker
        self.say = say
        self.steps: queue.Queue[tuple[int, StepMetrics, Sequence[Group]]] = queue.Queue(ROOM)
        self.started = threading.Event()
        self.closing = threading.Event()
        self.refused: ConfigError | None = None
        self.trouble: str = ""
        """What went wrong and has not been said yet; the thread must not print into a progress line."""
        self.failed = False
        self.dropped = 0
        self.thread: threading.Thread | None = None
        self.wants_groups = False

    def start(self, config: TrainConfig) -> None:
        """Begin; a refusal that comes soon ends the run before it trains, anything else only silences the tracker."""
        # Kept in the queue only where they will be sent: they hold every token of a step.
        self.wants_groups = config.logging.log_completions
        self.thread = threading.Thread(target=self._work, args=(config,), name=self.name, daemon=True)
        self.thread.start()
        if not self.started.wait(START_S):
            self.say(f"Warning: {self.name} has not answered for {START_S:g} s; training goes on without waiting.")
        if self.refused is not None:
            raise self.refused
        self._say_trouble()

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Leave a step for the thread to send."""
        self._say_trouble()
        if self.failed:
            return
        try:
            # A copy: the caller's is its own to change.
            self.steps.put_nowait((step, dict(metrics), groups if self.wants_groups else ()))
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Let the thread send what is left, for as long as that is bearable."""
        self.closing.set()
        if self.thread is not None:
            self.thread.join(FINISH_S)
            if self.thread.is_alive():
                self.say(f"Warning: {self.name} was still busy after {FINISH_S:g} s and was left behind.")
        self._say_trouble()
        if self.dropped:
            self.say(f"Warning: {self.name} was too slow: {self.dropped} steps are missing there; the logs have them.")

    def _say_trouble(self) -> None:
        if self.trouble:
            self.say(f"Warning: {self.name} failed and is left out from here on: {self.trouble}")
            self.trouble = ""

    def _work(self, config: TrainConfig) -> None:
        try:
            self.tracker.start(config)
        except ConfigError as error:
            self.refused = error
            self.failed = True
        except Exception as error:
            self._fail(error)
        self.started.set()
        while not self.failed and (step := self._next()) is not None:
            try:
                self.tracker.log(*step)
            except Exception as error:
                self._fail(error)
        with contextlib.suppress(Exception):
            self.tracker.finish()

    def _next(self) -> tuple[int, StepMetrics, Sequence[Group]] | None:
        """The next step to send; None when there will be no more."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self.steps.get(timeout=0.1)
            if self.closing.is_set():
                return None

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self.trouble = f"{type(error).__name__}: {error}"
