"""Cost of a run on a service that bills tokens: tokens of each kind times their prices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.capacity.memory import Workload
from retrain.config import TrainConfig
from retrain.storage.logs import groups_sampled

MILLION = 1_000_000
_COUNTED = ("tokens_per_s", "sample_time_s", "num_datums")


@dataclass(frozen=True)
class Prices:
    """Prices per million tokens of each kind, in any currency."""

    prefill: float
    sample: float
    train: float


@dataclass(frozen=True)
class Tokens:
    """Tokens by billing category."""

    prefill: float
    """Prompt tokens, counted once per group."""
    sample: float
    train: float
    """Prompt and completion tokens of all trained rows."""

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prefill + other.prefill, self.sample + other.sample, self.train + other.train)

    def times(self, count: float) -> Tokens:
        """Multiplied by a count."""
        return Tokens(self.prefill * count, self.sample * count, self.train * count)

    def cost(self, prices: Prices) -> float:
        """Total cost."""
        billed = self.prefill * prices.prefill + self.sample * prices.sample + self.train * prices.train
        return billed / MILLION


def max_tokens_per_step(work: Workload, turns: int = 1) -> Tokens:
    """A step in which every turn of every completion reaches `max_tokens` and every group is trained on."""
    sampled = work.completions * work.max_tokens * turns
    return Tokens(work.prompts * work.prompt_tokens, sampled, sampled + work.completions * work.prompt_tokens)


def logged_prompt_tokens(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Mean length of the prompts of logged steps, rounded; None if a step does not have it."""
    lengths = [row.get("prompt_tokens_mean") for row in rows]
    known = [float(length) for length in lengths if isinstance(length, int | float)]
    return round(sum(known) / len(known)) if known and len(known) == len(lengths) else None


def logged_groups(rows: Sequence[Mapping[str, Any]], work: Workload) -> float:
    """Mean groups per logged step, which resampling adds to; those of `work` if a step does not have them."""
    counts = [groups_sampled(row) for row in rows]
    return sum(counts) / len(counts) if counts and all(counts) else work.prompts


def logged_tokens(rows: Sequence[Mapping[str, Any]], work: Workload) -> Tokens | None:
    """Mean over logged steps, with prompt tokens from `work`; None without enough data."""
    if not rows or not all(isinstance(row.get(key), int | float) for row in rows for key in _COUNTED):
        return None
    sampled = sum(float(row["tokens_per_s"]) * float(row["sample_time_s"]) for row in rows) / len(rows)
    trained_rows = sum(float(row["num_datums"]) for row in rows) / len(rows)
    groups = logged_groups(rows, work)
    completion = sampled / max(1.0, groups * work.group)
    return Tokens(groups * work.prompt_tokens, sampled, trained_rows * (work.prompt_tokens + completion))


def count_evaluations(config: TrainConfig, steps: int) -> int:
    """Evaluations of a run: before the first step, every `eval.every` steps, and after the last."""
    return math.ceil(steps / config.eval.every) + 1 if config.eval.every else 0


def evaluation_tokens(config: TrainConfig, problems: int, prompt: float, completion: float) -> Tokens:
    """One evaluation of this many problems, with prompts and completions of these lengths."""
    return Tokens(problems * prompt, problems * config.eval.samples * completion, 0)
