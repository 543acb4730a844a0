"""completions.jsonl: sampled completions of a run with TRL, for a part of its batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from retrain.storage.logs import parse_rows, replace_rows

NAME = "completions.jsonl"


class CompletionLog(TrainerCallback):  # type: ignore[misc]
    """Appends completions; a resumed run first removes those of the steps that it repeats."""

    def __init__(self, output_dir: str) -> None:
        self.path = Path(output_dir) / NAME

    def append(self, step: int, split: str, count: int, logs: Mapping[str, Any]) -> None:
        """Append the newest `count` completions of TRL's logs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for at in range(-min(count, len(logs["completion"])), 0):
                row = {"step": step, "split": split}
                row |= {key: logs[key][at] for key in ("prompt", "completion", "advantages")}
                file.write(json.dumps(row | {"rewards": _rewards(logs["rewards"], at)}, default=float) + "\n")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Cut the file back to the checkpoint that is resumed."""
        if state.global_step and state.is_world_process_zero and self.path.exists():
            rows = list(parse_rows(self.path.read_bytes().split(b"\n")))
            replace_rows(self.path, [row for row in rows if _is_before(row, state.global_step)])


def _is_before(row: Mapping[str, Any], step: int) -> bool:
    # A step is evaluated before its checkpoint is written.
    return bool(row.get("step", 0) < step or (row.get("split") == "eval" and row["step"] == step))


def _rewards(values: Mapping[str, Sequence[Any]], at: int) -> dict[str, float | None]:
    # A reward of None is NaN by now, which JSON does not have.
    scores = {name: float(each[at]) for name, each in values.items()}
    return {name: None if math.isnan(score) else score for name, score in scores.items()}
