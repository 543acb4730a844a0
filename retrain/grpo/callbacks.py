"""transformers' callbacks on retrain's loop: a tracker that keeps a TrainerState and calls them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.evaluate import Evaluation
from retrain.types import Group, StepMetrics

EVENTS = (
    "on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end",
)  # fmt: skip
"""The events that retrain's loop has."""
ALIASES = {
    "mean_reward": "reward", "kl_ref": "kl", "lr": "learning_rate", "max_token_hit_rate": "completions/clipped_ratio",
}  # fmt: skip
"""Metrics that TRL has under another name; `log_history` has both."""
_WISHES = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Callbacks:
    """A Tracker that calls the callbacks and writes `state.log_history`; a RunControl that lets them stop the run."""

    def __init__(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.args = args
        self.state = state
        self.control = control
        self.callbacks: list[TrainerCallback] = []
        self.config: TrainConfig | None = None
        self.unsaved = 0
        """A step whose checkpoint is written after the callbacks heard of it."""
        self.epoch_steps = 1.0
        self.losses: list[float] = []
        self.reward = 0.0
        self.failure: BaseException | None = None
        """What a callback raised in the middle of a step, to be raised when the step is whole."""
        self.begun = False

    def add(self, callback: Any) -> None:
        """Take one on, if it listens to events that there are."""
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise ConfigError(f"callbacks holds {callback!r}, which is no transformers.TrainerCallback.")
        own = [n for n in vars(TrainerCallback) if n.startswith("on_") and overrides(made, n)]
        unknown = [name for name in own if name not in EVENTS]
        if unknown:
            raise ConfigError(
                f"the callback {type(made).__name__} listens to {', '.join(unknown)}, which are not events here.  "
                f"There are: {', '.join(EVENTS)}"
            )
        self.callbacks.append(made)
        if "on_init_end" in own:
            self._tell("on_init_end", [made])

    def start(self, config: TrainConfig) -> None:
        """The run begins, or goes on."""
        self.config = config
        self.losses.clear()
        self.failure = None
        self.begun = True
        self.state.max_steps = config.training.max_steps
        self.state.logging_steps = config.logging.every
        self.state.save_steps = config.training.save_every
        self.state.eval_steps = config.eval.every
        self.control.should_training_stop = False
        self._tell("on_train_begin")

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """A step is done; its checkpoint, if any, comes after this. What a callback raises waits for that."""
        try:
            self._tell_step(step, metrics)
        except BaseException as error:
            self.failure = error

    def should_stop(self) -> bool:
        """Whether a callback set `should_training_stop`; raises what one raised."""
        self.raise_failure()
        return bool(self.control.should_training_stop)

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """Nothing: callbacks are called from `log`, with the metrics of a finished step."""

    def raise_failure(self) -> None:
        """Raise what a callback raised, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _tell_step(self, step: int, metrics: StepMetrics) -> None:
        assert self.config is not None
        self._tell_saved()
        done = step + 1
        self.state.global_step = done
        self.state.epoch = done / self.epoch_steps
        self.reward = float(metrics["mean_reward"] or 0.0)
        if isinstance(metrics["loss"], float) and math.isfinite(metrics["loss"]):
            self.losses.append(metrics["loss"])
        saving = self.config.training.save_every
        self.unsaved = done if done % saving == 0 or done == self.config.training.max_steps else 0
        self._tell("on_step_end")
        row = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        row |= {theirs: row[ours] for ours, theirs in ALIASES.items() if ours in row}
        held_out = {key: value for key, value in row.items() if key.startswith("eval_")}
        every = self.config.logging.every
        if every and done % every == 0:
            self._tell_row(row)
        elif held_out:
            self._tell_row(held_out)
        if held_out:
            self._tell("on_evaluate", metrics=held_out)

    def evaluate_last(self, evaluation: Evaluation | None) -> None:
        """The evaluation after the last step, if there is one."""
        if evaluation is not None:
            held_out = {k: v for k, v in evaluation.metrics().items() if isinstance(v, int | float)}
            self._tell_row(held_out)
            self._tell("on_evaluate", metrics=held_out)

    def finish(self) -> None:
        """The last checkpoint is written; the trainer says when all is over."""
        self._tell_saved()

    def end(self) -> None:
        """The run is over, however it ended, if it ever began."""
        if self.begun:
            self.begun = False
            self._tell("on_train_end")

    def _tell_row(self, row: Mapping[str, float]) -> None:
        dated = {**row, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(dated)
        self._tell("on_log", logs=dict(dated))

    def _tell_saved(self) -> None:
        if self.unsaved:
            self.unsaved = 0
            self._tell("on_save")

    def _tell(self, event: str, only: Sequence[TrainerCallback] = (), **more: Any) -> None:
        for callback in only or self.callbacks:
            told = getattr(callback, event)(self.args, self.state, self.control, **more)
            self.control = told if isinstance(told, TrainerControl) else self.control
            wishes = [name for name in _WISHES if vars(self.control)[name]]
            if wishes:
                raise ConfigError(
                    f"the callback {type(callback).__name__} set control.{wishes[0]}, which has no effect here; "
                    "only should_training_stop has."
                )


def overrides(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback's class has an event of its own."""
    return getattr(type(callback), event) is not getattr(TrainerCallback, event)
