"""Runs a tracker for a remote service in a thread, and drops steps that it cannot keep up with.

Training waits briefly for its start, so that a wrong project is reported at once, and for its end; never in between.
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
# Maximum queued steps.
MAX_QUEUED = 1000


class BackgroundTracker:
    """Runs another tracker in its own thread."""

    def __init__(self, name: str, tracker: Tracker, notify: Callable[[str], None]) -> None:
        self.name = name
        self.tracker = tracker
        self.notify = notify
        self.steps: queue.Queue[tuple[int, StepMetrics, Sequence[Group]]] = queue.Queue(MAX_QUEUED)
        self.started = threading.Event()
        self.closing = threading.Event()
        self.config_error: ConfigError | None = None
        self.error: str = ""
        """Unreported error; the thread must not print into a progress line."""
        self.failed = False
        self.dropped = 0
        self.thread: threading.Thread | None = None
        self.sends_groups = False

    def start(self, config: TrainConfig) -> None:
        """Start; an early ConfigError ends the run, any other error only disables the tracker."""
        # Queued only if they will be sent: groups hold every token of a step.
        self.sends_groups = config.logging.log_completions
        self.thread = threading.Thread(target=self._work, args=(config,), name=self.name, daemon=True)
        self.thread.start()
        if not self.started.wait(START_S):
            self.notify(
                f"Warning: {self.name} has not responded for {START_S:g} s; training continues without waiting."
            )
        if self.config_error is not None:
            raise self.config_error
        self._report_error()

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Queue a step."""
        self._report_error()
        if self.failed:
            return
        try:
            # Copied: the caller may change it.
            self.steps.put_nowait((step, dict(metrics), groups if self.sends_groups else ()))
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Send the remaining steps, up to a time limit."""
        self.closing.set()
        if self.thread is not None:
            self.thread.join(FINISH_S)
            if self.thread.is_alive():
                self.notify(f"Warning: {self.name} was still busy after {FINISH_S:g} s and was abandoned.")
        self._report_error()
        if self.dropped:
            self.notify(
                f"Warning: {self.name} was too slow: {self.dropped} steps are missing there; the logs have them."
            )

    def _report_error(self) -> None:
        if self.error:
            self.notify(f"Warning: {self.name} failed and is disabled: {self.error}")
            self.error = ""

    def _work(self, config: TrainConfig) -> None:
        try:
            self.tracker.start(config)
        except ConfigError as error:
            self.config_error = error
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
        """The next step to send; None at the end."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self.steps.get(timeout=0.1)
            if self.closing.is_set():
                return None

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self.error = f"{type(error).__name__}: {error}"
