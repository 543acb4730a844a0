"""The learning rate of each step.

A pure function of the step, shared by all backends: there is no state to save. The formulas and the names of their
arguments are those of transformers' schedulers; `retrain.config.rules.schedule` validates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from retrain.config.rules.schedule import POLYNOMIAL_LR_END, used_arguments
from retrain.config.schema import TrainConfig
from retrain.runtime.text import plural


@dataclass(frozen=True)
class _Position:
    step: int
    warmup: int
    last: int
    lr: float

    @property
    def progress(self) -> float:
        """Fraction of the steps after the warm-up that are done; [backpressure] may add steps at the end."""
        return min(1.0, (self.step - self.warmup) / max(1, self.last - self.warmup))


def _constant(at: _Position) -> float:
    return 1.0


def _linear(at: _Position) -> float:
    return max(0.0, 1.0 - at.progress)


def _cosine(at: _Position, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> float:
    wave = max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * at.progress)))
    return wave * (1.0 - min_lr_rate) + min_lr_rate


def _cosine_with_restarts(at: _Position, num_cycles: float = 1) -> float:
    if at.progress >= 1:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * at.progress) % 1.0))))


def _polynomial(at: _Position, lr_end: float = POLYNOMIAL_LR_END, power: float = 1.0) -> float:
    left = max(0.0, 1.0 - at.progress)
    return float((at.lr - lr_end) * left**power + lr_end) / at.lr


def _inverse_sqrt(at: _Position, timescale: float = 0) -> float:
    timescale = timescale or at.warmup or 10_000
    return 1.0 / math.sqrt((at.step - at.warmup + timescale) / timescale)


_SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
}


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    training, optimizer = config.training, config.optimizer
    warmup = warmup_steps(optimizer.warmup_steps, training.max_steps)
    if step < warmup:
        return training.lr * step / warmup
    factor = _SCHEDULES[optimizer.schedule]
    at = _Position(step, warmup, training.max_steps, training.lr)
    return training.lr * factor(at, **used_arguments(optimizer))


def find_long_warmup(config: TrainConfig) -> str:
    """A sentence if a run ends within its warm-up, or ""; with epochs, the number of steps is not known here."""
    warmup, steps = config.optimizer.warmup_steps, config.training.max_steps
    if not 0 < steps <= warmup_steps(warmup, steps):
        return ""
    extent = "is all of" if warmup < 1 else "is not below"
    return (
        f"[optimizer] warmup_steps = {warmup:g} {extent} {plural(steps, 'step')}: the learning rate never reaches lr."
    )


def warmup_steps(warmup: float, max_steps: int) -> int:
    """Number of warm-up steps; a value below 1 is a fraction of all steps."""
    return math.ceil(warmup * max_steps) if warmup < 1 else int(warmup)
