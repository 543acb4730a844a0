"""What a run costs on a service that bills tokens: how many of each kind, times the prices that were given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.capacity.memory import Workload
from retrain.config import TrainConfig

MILLION = 1_000_000
_COUNTED = ("tokens_per_s", "sample_time_s", "num_datums")


@dataclass(frozen=True)
class Prices:
    """Of a million tokens of each kind, in whatever money they were given."""

    prefill: float
    sample: float
    train: float


@dataclass(frozen=True)
class Tokens:
    """Tokens by how they are billed."""

    prefill: float
    """Prompts that were read before sampling, once for all completions of a group."""
    sample: float
    train: float
    """Prompt and completion of every row that was trained on."""

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prefill + other.prefill, self.sample + other.sample, self.train + other.train)

    def times(self, count: float) -> Tokens:
        """So many of these."""
        return Tokens(self.prefill * count, self.sample * count, self.train * count)

    def cost(self, prices: Prices) -> float:
        """What they come to."""
        billed = self.prefill * prices.prefill + self.sample * prices.sample + self.train * prices.train
        return billed / MILLION


def most_tokens(work: Workload) -> Tokens:
    """A step in which every completion runs to `max_tokens` and every group is trained on."""
    sampled = work.completions * work.max_tokens
    return Tokens(work.prompts * work.prompt_tokens, sampled, sampled + work.completions * work.prompt_tokens)


def logged_tokens(rows: Sequence[Mapping[str, Any]], work: Workload) -> Tokens | None:
    """The mean over logged steps, of which prompts alone are taken from `work`; None where too little was logged."""
    if not rows or not all(isinstance(row.get(key), int | float) for row in rows for key in _COUNTED):
        return None
    sampled = sum(float(row["tokens_per_s"]) * float(row["sample_time_s"]) for row in rows) / len(rows)
    trained_rows = sum(float(row["num_datums"]) for row in rows) / len(rows)
    completion = sampled / work.completions
    return Tokens(work.prompts * work.prompt_tokens, sampled, trained_rows * (work.prompt_tokens + completion))


def evaluation_tokens(config: TrainConfig, work: Workload, step: Tokens, steps: int) -> Tokens:
    """All evaluations of a run: before the first step, every so many steps, and after the last."""
    if not config.eval.every:
        return Tokens(0, 0, 0)
    count = math.ceil(steps / config.eval.every) + 1
    problems, completion = config.eval.max_examples, step.sample / work.completions
    return Tokens(problems * work.prompt_tokens, problems * config.eval.samples * completion, 0).times(count)
