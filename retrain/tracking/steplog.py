"""Logs steps: to the console at once, to the trackers once their own metrics are known."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.config import TrainConfig
from retrain.tracking import Tracker
from retrain.types import Group, StepMetrics

# Metrics of the sampler. A backend that trains while the next step is being sampled reports them with their own step,
# and everything else one step late.
SAMPLER_METRICS = ("staleness", "policy_proof", "mismatch_mean", "mismatch_max", "mismatch_kl")


class StepLog:
    """Logs steps. A row whose loss is a placeholder is held back until `settle` completes it."""

    def __init__(self, screen: Tracker, record: Tracker) -> None:
        self.screen = screen
        self.record = record
        self.pending: tuple[int, StepMetrics, Sequence[Group]] | None = None
        self.previous: StepMetrics = {}
        """What the backend reported last, of the step before that of the pending row."""

    def start(self, config: TrainConfig) -> None:
        """Start the console and the trackers."""
        self.record.start(config)
        self.screen.start(config)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group], asked: Sequence[Group] = ()) -> None:
        """Log a step, which may still be training; the console shows the groups as `asked`.

        The files keep the order of `groups`, in which they are trained on and recorded: the report finds the tokens of
        a group by its number.
        """
        self.screen.log(step, metrics, asked or groups)
        if metrics["loss_is_placeholder"]:
            self.pending = step, metrics, groups
        else:
            self.record.log(step, metrics, groups)

    def settle(self, outcome: StepMetrics, skipped_steps: int) -> None:
        """Write the pending row, if there is one, with the metrics of its own step."""
        own = {key: value for key, value in outcome.items() if key not in (*SAMPLER_METRICS, "skipped")}
        if self.pending is not None:
            # A step without data may have no value where the one before had.
            none = dict.fromkeys(self.previous)
            self._write(none | own | {"loss_is_placeholder": False, "skipped_steps": skipped_steps})
        self.previous = own

    def release(self) -> None:
        """Write the pending row unchanged: its own metrics will never arrive."""
        if self.pending is not None:
            self._write({})

    def finish(self) -> None:
        """Finish the console and the trackers."""
        self.screen.finish()
        self.record.finish()

    def _write(self, own: StepMetrics) -> None:
        assert self.pending is not None
        (step, metrics, groups), self.pending = self.pending, None
        self.record.log(step, metrics | own, groups)
