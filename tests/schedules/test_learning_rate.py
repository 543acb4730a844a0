"""Learning rates of all steps, against transformers' own schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from retrain.config import load_config
from retrain.errors import ConfigError
from retrain.schedules.learning_rate import learning_rate, warmup_steps

STEPS = 40


def rates(**options: Any) -> list[float]:
    config = load_config(None, {"training.max_steps": STEPS, "training.lr": 0.01} | options)
    return [learning_rate(config, step) for step in range(STEPS)]


def transformers_rates(name: str, warmup: int, args: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=args)
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("ours", "theirs", "args"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine", "cosine", {"num_cycles": 1.25}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_restarts", "cosine_with_restarts", {}),
        ("cosine_with_restarts", "cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", "polynomial", {}),
        ("polynomial", "polynomial", {"power": 2.0, "lr_end": 1e-3}),
        ("inverse_sqrt", "inverse_sqrt", {}),
        ("inverse_sqrt", "inverse_sqrt", {"timescale": 5}),
    ],
)
def test_every_schedule_is_that_of_transformers(ours: str, theirs: str, args: dict[str, Any], warmup: int) -> None:
    found = rates(**{
        "optimizer.schedule": ours, "optimizer.schedule_args": args, "optimizer.warmup_steps": float(warmup),
    })  # fmt: skip
    assert found == pytest.approx(transformers_rates(theirs, warmup, args), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_steps_beyond_the_last_keep_its_rate(schedule: str) -> None:
    config = load_config(None, {"training.max_steps": STEPS, "training.lr": 0.01, "optimizer.schedule": schedule})
    beyond = {learning_rate(config, step) for step in range(STEPS, 3 * STEPS)}
    assert len(beyond) == 1 and beyond.pop() <= rates(**{"optimizer.schedule": schedule})[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"optimizer.schedule": "polynomial", "training.lr": 2e-8},
            "the default lr_end of 1e-07 that is not below",
        ),
        ({"optimizer.schedule": "cosine", "optimizer.schedule_args": {"num_cycles": 1e308}}, "must be between 0 and"),
    ],
)
def test_arguments_that_no_schedule_can_follow_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rates(**options)


def test_without_a_schedule_every_step_has_the_same_rate() -> None:
    assert set(rates()) == {0.01}


def test_a_warm_up_below_one_is_a_share_of_all_steps() -> None:
    assert warmup_steps(0.25, 40) == 10
    assert warmup_steps(0.01, 40) == 1
    assert warmup_steps(3.0, 40) == 3
    assert rates(**{"optimizer.warmup_steps": 0.25}) == rates(**{"optimizer.warmup_steps": 10.0})
