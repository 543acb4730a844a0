"""The log files of a run: their names, reading them, and what a resume does with them.

A resume cuts what was logged after its checkpoint. Rows that were lost since are rebuilt from the other files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from retrain.types import JsonObject

METRICS, STEPS, GENERATIONS, EVALS, DEBUG = (
    "metrics.jsonl",
    "emergence/steps.jsonl",
    "emergence/generations.jsonl",
    "eval.jsonl",
    "debug.jsonl",
)
FILES = (METRICS, STEPS, GENERATIONS, EVALS, DEBUG)
EVAL_PROBLEMS = "eval_problems.jsonl"
# Only the folder of a campaign has it.
MANIFEST = "manifest.json"
# Under which names a resumed run continues in the trackers.
WANDB_ID, TRACKIO_NAME = "wandb_run_id", "trackio_run_name"
SERVER_LOG, RANK_LOGS = "vllm.log", "ranks"
# What a run of a campaign prints, and the process of all runs.
STDOUT, STDERR, SHARED_LOG = "stdout.log", "stderr.log", "shared.log"
REPORT, CARD = "report.html", "card"
# Logs of retrain have no NaN and no infinity; those of other writers become null.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_MOST_STEPS = 1 << 53
_RATES = ("eval_pass_at_1", "eval_pass_at_k", "eval_ci_low", "eval_ci_high")


def parse_rows(lines: Iterable[str | bytes]) -> Iterator[JsonObject]:
    """Parse the lines of a log; truncated lines and values other than objects are skipped."""
    for line in lines:
        try:
            row = _DECODER.decode(line if isinstance(line, str) else line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def has_step(row: Mapping[str, object]) -> bool:
    """Whether a row belongs to a step."""
    step = row.get("step")
    return type(step) is int and 0 <= step < _MOST_STEPS


def only_steps(rows: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """The rows that belong to a step."""
    return filter(has_step, rows)


def groups_sampled(row: Mapping[str, object]) -> float:
    """Groups sampled in a step, including replacements for dead ones; older logs only have the batch size.

    0 if the row has neither.
    """
    counts = (row.get(name) for name in ("groups_sampled", "batch_size"))
    return next((float(count) for count in counts if isinstance(count, int | float) and count), 0.0)


def only_evaluations(rows: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """The rows that are usable as evaluations. If nothing was scored there are no rates; earlier versions wrote 0."""
    for row in rows:
        if _is_evaluation(row):
            yield row if _has_scores(row) else row | dict.fromkeys(_RATES)


def _has_scores(row: Mapping[str, object]) -> bool:
    counted = row.get("counted")
    return any(counted) if isinstance(counted, list) and counted else True


def _is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row is usable as an evaluation: its rates are numbers, and its counts lists of them."""
    rates = [row.get(name, 0) for name in _RATES] if _has_scores(row) else []
    correct, counted = (row.get(name, []) for name in ("correct", "counted"))
    if not isinstance(correct, list) or not isinstance(counted, list) or len(correct) != len(counted):
        return False
    are_numbers = all(type(rate) in (int, float) and math.isfinite(rate) for rate in rates)  # type: ignore[arg-type]
    are_counts = all(type(c) is type(n) is int and 0 <= c <= n for c, n in zip(correct, counted, strict=True))
    return has_step(row) and are_numbers and are_counts


def cut_logs(log_dir: Path, sizes: Mapping[str, int], steps: int, names: Iterable[str] = FILES) -> list[str]:
    """Truncate these files to their sizes at a checkpoint after `steps` steps; later steps will be rewritten.

    Returns the names of files that are shorter than that or were changed since; they are left as they are.
    """
    changed = []
    for name in names:
        path = log_dir / name
        # The run before the checkpoint may not have written a file that an earlier part of it wrote.
        size = sizes[name] if name in sizes else _size_before(path, steps)
        held = path.stat().st_size if path.exists() else 0
        if held < size or (size and not _ends_at(path, size, steps, name in (METRICS, STEPS))):
            changed.append(name)
        elif held > size:
            os.truncate(path, size)
    return changed


def steps_after(path: Path, steps: int) -> list[int]:
    """The steps of the rows that a resume at a checkpoint after `steps` steps removes."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [int(row["step"]) for row in parse_rows(lines) if has_step(row) and row["step"] >= steps]


def _size_before(path: Path, steps: int) -> int:
    """The size of the complete rows before `steps`, at the start of a log."""
    size = 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or not 0 <= _step_of(line) < steps:
                    break
                size += len(line)
    return size


def _ends_at(path: Path, size: int, steps: int, every_step: bool) -> bool:
    """Whether the rows before `steps` end at `size`; only the lines there and the first one are read."""
    with path.open("rb") as file:
        first = file.readline(size)
        block, before = 0, b""
        while block < size and b"\n" not in before[:-1]:
            block = min(size, 2 * block or 1 << 16)
            file.seek(size - block)
            before = file.read(block)
        after = file.readline()
    last = before[:-1].rpartition(b"\n")[2]
    numbers = [_step_of(line) for line in (first, last)]
    is_whole = before.endswith(b"\n") and all(0 <= number < steps for number in numbers)
    later = _step_of(after)
    return is_whole and (numbers[1] == steps - 1 or not every_step) and (later < 0 or later >= steps)


def _step_of(line: bytes) -> int:
    """The step of a row; -1 if it is not one."""
    return next((int(row["step"]) for row in parse_rows([line]) if has_step(row)), -1)


def restore_logs(log_dir: Path, changed: Sequence[str], steps: int, condition: str, log: Callable[[str], None]) -> None:
    """Rebuild `steps` steps of files that are too short or were changed, as far as the other files allow."""
    for name in (STEPS, METRICS):
        if name in changed:
            _restore(log_dir, name, steps, condition, log)
    for name in (name for name in changed if name not in (STEPS, METRICS)):
        replace_rows(log_dir / name, _rows_before(log_dir / name, steps))
        log(f"Warning: {log_dir / name} was shortened or changed since the checkpoint. Lost rows cannot be rebuilt.")


def _restore(log_dir: Path, name: str, steps: int, condition: str, log: Callable[[str], None]) -> None:
    rows = {row["step"]: row for row in _rows_before(log_dir / name, steps)}
    lost = [step for step in range(steps) if step not in rows]
    found = dict(_metrics_rows(log_dir, steps) if name == METRICS else _summaries(log_dir, steps, condition))
    rebuilt = {step: {**found[step], "rebuilt": True} for step in lost if step in found}
    replace_rows(log_dir / name, [row for _, row in sorted((rows | rebuilt).items())])
    if not lost:
        log(f"Warning: {log_dir / name} was changed since the checkpoint; it still has the rows of all earlier steps.")
        return
    text = f"Warning: {log_dir / name} lost the rows of {_list_steps(lost)} since the checkpoint."
    if rebuilt:
        what = "with rewards and evaluations only" if name == METRICS else "from the completions"
        text += f" Those of {_list_steps(rebuilt)} were rebuilt {what}."
    if not rebuilt:
        text += (
            " The other logs do not have them."
            if name == METRICS
            else " There are no completions to rebuild them from."
        )
    log(text)


def _metrics_rows(log_dir: Path, steps: int) -> Iterator[tuple[int, JsonObject]]:
    """Metrics of each step from the summaries and evaluations."""
    evaluations = {row["step"]: row for row in _rows_before(log_dir / EVALS, steps)}
    right = scored = 0
    for row in sorted(_rows_before(log_dir / STEPS, steps), key=lambda row: int(row["step"])):
        right += int(row["correct_count"])
        scored += int(row["total_count"])
        measured = {key: value for key, value in evaluations.get(row["step"], {}).items() if key.startswith("eval_")}
        yield (
            row["step"],
            {
                "step": row["step"],
                "condition": row["condition"],
                "mean_reward": row["mean_reward"],
                "correct_rate": int(row["correct_count"]) / row["total_count"] if row["total_count"] else None,
                "running_correct_rate": right / scored if scored else None,
                **measured,
            },
        )


def _summaries(log_dir: Path, steps: int, condition: str) -> Iterator[tuple[int, JsonObject]]:
    """Summaries of the steps whose completions were logged."""
    scores: dict[int, list[JsonObject]] = {}
    for row in _rows_before(log_dir / GENERATIONS, steps):
        scores.setdefault(row["step"], []).append(row)
    for step, rows in scores.items():
        rewards = [float(row["reward"]) for row in rows if row["reward"] is not None]
        yield (
            step,
            {
                "step": step,
                "mean_reward": sum(rewards) / len(rewards) if rewards else None,
                "correct_count": sum(row["outcome"] == "right" for row in rows),
                "total_count": len(rewards),
                "condition": condition,
            },
        )


def _rows_before(path: Path, steps: int) -> list[JsonObject]:
    """Complete rows before `steps`."""
    if not path.exists():
        return []
    # Only a newline ends a row: completions may contain other Unicode line breaks.
    lines = path.read_bytes().split(b"\n")
    return [row for row in parse_rows(lines) if has_step(row) and row["step"] < steps]


def replace_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replace a log atomically."""
    draft = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    draft.write_bytes(text.encode("utf-8", "replace"))
    os.replace(draft, path)


def _list_steps(steps: Iterable[int]) -> str:
    """E.g. `step 3`, or `steps 0-4, 7`."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"step{'s' if len(parts) > 1 or '-' in parts[0] else ''} {', '.join(parts)}"
