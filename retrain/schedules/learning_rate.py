"""The learning rate of a step, as a share of `[training] lr`.

A pure function of the step: there is no state to save, and every backend asks the same one. The formulas and the names
of their arguments are those of transformers' schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigIssue

if TYPE_CHECKING:
    from retrain.config.schema import Optimizer, TrainConfig


@dataclass(frozen=True)
class _At:
    """Where a step stands."""

    step: int
    warmup: int
    last: int
    lr: float

    @property
    def progress(self) -> float:
        """How much of the way from the end of the warm-up to the last step is done."""
        return (self.step - self.warmup) / max(1, self.last - self.warmup)


def _constant(at: _At) -> float:
    return 1.0


def _linear(at: _At) -> float:
    return max(0.0, 1.0 - at.progress)


def _cosine(at: _At, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> float:
    wave = max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * at.progress)))
    return wave * (1.0 - min_lr_rate) + min_lr_rate


def _cosine_with_restarts(at: _At, num_cycles: float = 1) -> float:
    if at.progress >= 1:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * at.progress) % 1.0))))


def _polynomial(at: _At, lr_end: float = 1e-7, power: float = 1.0) -> float:
    left = max(0.0, 1.0 - at.progress)
    return float((at.lr - lr_end) * left**power + lr_end) / at.lr


def _inverse_sqrt(at: _At, timescale: float = 0) -> float:
    timescale = timescale or at.warmup or 10_000
    return 1.0 / math.sqrt((at.step - at.warmup + timescale) / timescale)


# Each with its arguments and their bounds.
_SCHEDULES: dict[str, tuple[Callable[..., float], dict[str, tuple[float, float]]]] = {
    "constant": (_constant, {}),
    "linear": (_linear, {}),
    "cosine": (_cosine, {"num_cycles": (0, math.inf), "min_lr_rate": (0, 1)}),
    "cosine_with_restarts": (_cosine_with_restarts, {"num_cycles": (0, math.inf)}),
    "polynomial": (_polynomial, {"lr_end": (0, 10), "power": (0, math.inf)}),
    "inverse_sqrt": (_inverse_sqrt, {"timescale": (1, math.inf)}),
}


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, the first being 0."""
    training, optimizer = config.training, config.optimizer
    warmup = warmup_steps(optimizer.warmup_steps, training.max_steps)
    if step < warmup:
        return training.lr * step / warmup
    shape, _ = _SCHEDULES[optimizer.schedule]
    return training.lr * shape(_At(step, warmup, training.max_steps, training.lr), **_used_args(optimizer))


def warmup_steps(wanted: float, max_steps: int) -> int:
    """Steps of the warm-up; below 1 it is a share of all."""
    return math.ceil(wanted * max_steps) if wanted < 1 else int(wanted)


def schedule_is_sound(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A schedule takes its own arguments only, and warm-ups are counted in whole steps."""
    optimizer = config.optimizer
    if optimizer.warmup_steps >= 1 and optimizer.warmup_steps != int(optimizer.warmup_steps):
        yield ConfigIssue(
            "[optimizer] warmup_steps",
            f"must be a whole number of steps, or a share below 1, got {optimizer.warmup_steps}.",
            f"Try: warmup_steps = {int(optimizer.warmup_steps)}.0",
        )
    args = _used_args(optimizer)
    wrong = list(_wrong_args(optimizer.schedule, args))
    yield from wrong
    if not wrong and args.get("lr_end", 0) >= config.training.lr:
        yield ConfigIssue("[optimizer] schedule_args", "has an lr_end that is not below [training] lr.")


def unused_schedule_args(optimizer: Optimizer) -> list[str]:
    """Arguments that only other schedules take."""
    _, known = _SCHEDULES[optimizer.schedule]
    others = {name for _, names in _SCHEDULES.values() for name in names} - known.keys()
    return [name for name in optimizer.schedule_args if name in others]


def _used_args(optimizer: Optimizer) -> dict[str, Any]:
    unused = unused_schedule_args(optimizer)
    return {name: value for name, value in optimizer.schedule_args.items() if name not in unused}


def _wrong_args(schedule: str, args: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    _, known = _SCHEDULES[schedule]
    for name, value in args.items():
        if name not in known:
            takes = f"It takes: {', '.join(known)}." if known else "It takes none."
            yield ConfigIssue("[optimizer] schedule_args", f"has {name!r}, which {schedule!r} does not take.", takes)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield ConfigIssue("[optimizer] schedule_args", f"has {name} = {value!r}, which is not a number.")
        elif not known[name][0] <= value <= known[name][1]:
            low, high = known[name]
            bounds = f"between {low:g} and {high:g}" if high < math.inf else f"at least {low:g}"
            yield ConfigIssue("[optimizer] schedule_args", f"has {name} = {value:g}, which must be {bounds}.")
