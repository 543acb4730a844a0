"""Writes the log files: metrics, steps, completions, evaluations with their problems, and debug.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from retrain.config import TrainConfig
from retrain.isolation.redaction import redact_all
from retrain.rewards.match import final_answer
from retrain.rewards.weighted import WeightedScore
from retrain.seeding import derive_seed
from retrain.storage.checkpoint import explain_write_error
from retrain.storage.logs import DEBUG, EVAL_PROBLEMS, EVALS, FILES, GENERATIONS, METRICS, STEPS, replace_rows
from retrain.tracking import prompt_text
from retrain.types import Group, JsonObject, Metric, StepMetrics

if TYPE_CHECKING:
    from retrain.evaluate import Evaluation

# Metrics of the update, in debug.jsonl.
RATIOS = ("ratio_mean", "ratio_max", "kl_sample_train", "kl_ref", "loss", "grad_norm")


class JsonlTracker:
    """Appends to the log files; checkpoints record their sizes, so that a resume can truncate them."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.files: dict[str, BinaryIO] = {}
        self.has_problems = False
        self.seed = 0
        self.share = 1.0
        self.all_groups = False
        self.extract: Callable[[str], str] | None = None

    def start(self, config: TrainConfig) -> None:
        """Open the files for appending."""
        self.seed, self.share = config.training.seed, config.logging.save_completions_probability
        self.extract = answer_extraction(config)
        self.all_groups = config.kl.beta > 0
        for name in FILES if config.logging.debug else FILES[:-1]:
            path = self.log_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files[name] = path.open("ab")

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Write one object per step, and one per completion with its full text."""
        scores = [score for group in groups for score in group.scores_G if score.counts]
        self.write(METRICS, [{key: _finite(value) for key, value in metrics.items()}])
        summary = {
            "step": step,
            "mean_reward": metrics["mean_reward"],
            "correct_count": sum(score.outcome == "right" for score in scores),
            "total_count": len(scores),
            "condition": metrics["condition"],
        }
        self.write(STEPS, [summary])
        if self.keeps_completions(step):
            rows = [row for group in groups for row in generation_rows(step, group, self.extract)]
            self.write(GENERATIONS, [redact_all(row) for row in rows])
        if DEBUG in self.files:
            self.write(DEBUG, [redact_all(debug_row(step, metrics, groups, self.all_groups))])

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the counts of an evaluation, and once the problems that they belong to, in the same order."""
        self.write(EVALS, [evaluation.record(step)])
        if self.has_problems:
            return
        self.has_problems = True
        examples = (example for example, _ in evaluation.answers)
        rows = ({"prompt": prompt_text(example), "reference": example.reference} for example in examples)
        try:
            replace_rows(self.log_dir / EVAL_PROBLEMS, [redact_all(row) for row in rows])
        except OSError as error:
            raise explain_write_error(error, self.log_dir) from error

    def keeps_completions(self, step: int) -> bool:
        """Whether this step's completions are written; depends on seed and step, so that a resume agrees."""
        return derive_seed(self.seed, "completions", step) < self.share * 2**32

    def finish(self) -> None:
        """Close the files."""
        for file in self.files.values():
            # A full disk was reported on writing.
            with contextlib.suppress(OSError):
                file.close()
        self.files.clear()

    def write(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Append rows in one write, so that a kill truncates at most the last one."""
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        try:
            # Unpaired surrogates, which code may return, would make the row unreadable.
            self.files[name].write(text.encode("utf-8", "replace"))
            self.files[name].flush()
        except OSError as error:
            raise explain_write_error(error, self.log_dir) from error

    def sizes(self) -> dict[str, int]:
        """Current size of each file on disk."""
        try:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise explain_write_error(error, self.log_dir) from error
        return {name: file.tell() for name, file in self.files.items()}


def answer_extraction(config: TrainConfig) -> Callable[[str], str] | None:
    """How the reward finds the answer in a completion; None if it does not look for one."""
    reward = config.reward
    types = {term.type for term in reward.terms} if reward.terms else {reward.type}
    if config.environment.provider or config.teaching.enabled or not types & {"match", "math"}:
        return None
    return partial(final_answer, think_boxes=reward.think_boxes)


def generation_rows(step: int, group: Group, extract: Callable[[str], str] | None = None) -> list[JsonObject]:
    """One row per completion; a failed score has a reason instead of a reward."""
    rows = []
    for completion, score in zip(group.completions_G, group.scores_G, strict=True):
        row: JsonObject = {
            "step": step,
            "prompt": prompt_text(group.example),
            "completion": completion.text,
            "reward": score.value if score.counts else None,
            "num_tokens": completion.num_sampled,
            "finish_reason": completion.finish_reason,
            "outcome": score.outcome,
        }
        if isinstance(score, WeightedScore) and score.counts:
            row["terms"] = dict(score.terms)
        if group.example.reference:
            row["reference"] = group.example.reference
        if extract is not None:
            row["answer"] = extract(completion.text)
        if completion.transcript:
            row["transcript"] = completion.transcript
        rows.append(row | ({"detail": score.detail} if score.detail and not score.counts else {}))
    return rows


def debug_row(step: int, metrics: StepMetrics, groups: Sequence[Group], all_groups: bool) -> JsonObject:
    """One row of debug.jsonl: what happened to every completion, and why.

    With a KL penalty, `all_groups` are trained on.
    """
    return {
        "step": step,
        **{key: _finite(metrics[key]) for key in RATIOS if key in metrics},
        "groups": [_group_row(group, all_groups) for group in groups],
    }


def _group_row(group: Group, all_groups: bool) -> JsonObject:
    """Rewards, advantages and lengths of a group, and excluded completions."""
    counting = [score.value for score in group.scores_G if score.counts]
    advantages = [] if group.advantages_G is None else [float(value) for value in group.advantages_G]
    dropped: dict[str, str] = {}
    for index, (completion, score) in enumerate(zip(group.completions_G, group.scores_G, strict=True)):
        if not score.counts:
            dropped[str(index)] = f"scoring: {score.outcome}"
        elif len(set(counting)) < 2 and not all_groups:
            dropped[str(index)] = "all rewards of the group are equal"
        elif not len(completion.token_ids_T):
            dropped[str(index)] = "empty"
    return {
        "id": group.example.id,
        "prompt_tokens": len(group.prompt_ids),
        "rewards": [score.value if score.counts else None for score in group.scores_G],
        "advantages": advantages,
        "lengths": [completion.num_sampled for completion in group.completions_G],
        "finish_reasons": [completion.finish_reason for completion in group.completions_G],
        "dropped": dropped,
    }


def _finite(value: Metric) -> Metric:
    """None for NaN and infinity, which JSON lacks; `skipped_steps` counts such steps."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
