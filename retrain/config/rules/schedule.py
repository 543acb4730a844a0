"""The rule about learning rate schedules: each accepts its own arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from retrain.config.options import option_issue
from retrain.config.schema import Optimizer, TrainConfig
from retrain.errors import ConfigIssue

ARGUMENTS: dict[str, dict[str, tuple[float, float]]] = {
    "constant": {},
    "linear": {},
    "cosine": {"num_cycles": (0, 1e6), "min_lr_rate": (0, 1)},
    "cosine_with_restarts": {"num_cycles": (0, 1e6)},
    "polynomial": {"lr_end": (0, 10), "power": (0, math.inf)},
    "inverse_sqrt": {"timescale": (1, math.inf)},
}
"""Arguments of each schedule with their bounds."""
POLYNOMIAL_LR_END = 1e-7


def unused_arguments(optimizer: Optimizer) -> list[str]:
    """Arguments that only other schedules accept."""
    others = {name for names in ARGUMENTS.values() for name in names} - ARGUMENTS[optimizer.schedule].keys()
    return [name for name in optimizer.schedule_args if name in others]


def used_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Arguments for the schedule that is used."""
    unused = unused_arguments(optimizer)
    return {name: value for name, value in optimizer.schedule_args.items() if name not in unused}


def check_schedule(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A schedule gets only arguments it accepts, and the warm-up is a whole number of steps."""
    optimizer = config.optimizer
    if optimizer.warmup_steps >= 1 and optimizer.warmup_steps != int(optimizer.warmup_steps):
        yield option_issue(
            "optimizer.warmup_steps",
            f"must be a whole number of steps, or a fraction below 1, got {optimizer.warmup_steps}.",
            f"Try: warmup_steps = {int(optimizer.warmup_steps)}.0",
        )
    args = used_arguments(optimizer)
    invalid = list(_check_arguments(optimizer.schedule, args))
    yield from invalid
    lr_end = args.get("lr_end", POLYNOMIAL_LR_END if optimizer.schedule == "polynomial" else 0.0)
    if not invalid and lr_end >= config.training.lr:
        which = "an lr_end" if "lr_end" in args else f"the default lr_end of {lr_end:g}"
        text = f"has {which} that is not below [training] lr."
        hint = f"Try: an lr_end of {config.training.lr / 10:g}"
        yield option_issue("optimizer.schedule_args", text, hint, compares=("optimizer", "training"))


def _check_arguments(schedule: str, args: Mapping[str, object]) -> Iterator[ConfigIssue]:
    known = ARGUMENTS[schedule]
    for name, value in args.items():
        low, high = known.get(name, (0, 0))
        bounds = f"between {low:g} and {high:g}" if high < math.inf else f"at least {low:g}"
        hint = ""
        if name not in known:
            text = f"has {name!r}, which {schedule!r} does not take."
            hint = f"It takes: {', '.join(known)}." if known else "It takes none."
        elif isinstance(value, bool) or not isinstance(value, int | float):
            text = f"has {name} = {value!r}, which is not a number."
            hint = f"Try: a number {bounds}"
        elif not low <= value <= high:
            text = f"has {name} = {value:g}, which must be {bounds}."
        else:
            continue
        yield option_issue("optimizer.schedule_args", text, hint)
