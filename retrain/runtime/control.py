"""Control of a run by its caller: the loop calls `after_step` and polls `should_stop`."""

from __future__ import annotations

from typing import Protocol

from retrain.types import StepMetrics


class RunControl(Protocol):
    """Steers a run from outside its loop."""

    def should_stop(self) -> bool:
        """Whether to save and stop. Polled before every step, and while completions are being sampled."""

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """Called after every step, once it is logged and its checkpoint, if due, is written. May block."""


class NoControl:
    """A RunControl that lets the run take all its steps."""

    def should_stop(self) -> bool:
        """Always False."""
        return False

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """Does nothing."""


class StopRequested(KeyboardInterrupt):
    """A RunControl asked the run to stop. Handled like Ctrl-C: the running step is discarded and the state saved."""


def raise_if_stopped(control: RunControl) -> None:
    """Raise StopRequested if the run should stop."""
    if control.should_stop():
        raise StopRequested
