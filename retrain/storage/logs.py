"""The log files of a run: their names, reading them, and what a resume does with them.

A resume cuts what was logged after its checkpoint. Rows that were lost since are rebuilt from the other files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS, STEPS, GENERATIONS, EVALS, DEBUG = (
    "metrics.jsonl",
    "emergence/steps.jsonl",
    "emergence/generations.jsonl",
    "eval.jsonl",
    "debug.jsonl",
)
FILES = (METRICS, STEPS, GENERATIONS, EVALS, DEBUG)

Row = dict[str, Any]


def whole_rows(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The rows among lines of a log; one that a kill tore, or that is no object, is left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def cut_logs(log_dir: Path, sizes: Mapping[str, int]) -> list[str]:
    """Shorten the files to what they held at a checkpoint: later steps will be written again.

    Returns the names of those that hold less than that, because somebody else shortened or deleted them.
    """
    short = []
    for name in FILES:
        path, size = log_dir / name, sizes.get(name, 0)
        held = path.stat().st_size if path.exists() else 0
        if held < size:
            short.append(name)
        elif held > size:
            os.truncate(path, size)
    return short


def restore_logs(log_dir: Path, short: Sequence[str], steps: int, condition: str, say: Callable[[str], None]) -> None:
    """Bring files that are shorter than their checkpoint says to `steps` steps, as far as the others know of them."""
    for name in (STEPS, METRICS):
        if name in short:
            _restore(log_dir, name, steps, condition, say)
    for name in (name for name in short if name not in (STEPS, METRICS)):
        _write(log_dir / name, _rows_before(log_dir / name, steps))
        say(f"Warning: {log_dir / name} is shorter than at the checkpoint. What it lost cannot be rebuilt.")


def _restore(log_dir: Path, name: str, steps: int, condition: str, say: Callable[[str], None]) -> None:
    rows = {row["step"]: row for row in _rows_before(log_dir / name, steps)}
    lost = [step for step in range(steps) if step not in rows]
    found = dict(_metrics_rows(log_dir, steps) if name == METRICS else _summaries(log_dir, steps, condition))
    rebuilt = {step: {**found[step], "rebuilt": True} for step in lost if step in found}
    _write(log_dir / name, [row for _, row in sorted((rows | rebuilt).items())])
    if not lost:
        return
    text = f"Warning: {log_dir / name} lost the rows of {_list_steps(lost)} since the checkpoint."
    if rebuilt:
        what = "with rewards and evaluations alone" if name == METRICS else "from the completions"
        text += f" Those of {_list_steps(rebuilt)} are rebuilt {what}."
    say(text if rebuilt else f"{text} The other logs do not have them.")


def _metrics_rows(log_dir: Path, steps: int) -> Iterator[tuple[int, Row]]:
    """What the summaries and the evaluations know of each step's metrics."""
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
                "correct_rate": int(row["correct_count"]) / max(1, int(row["total_count"])),
                "running_correct_rate": right / max(1, scored),
                **measured,
            },
        )


def _summaries(log_dir: Path, steps: int, condition: str) -> Iterator[tuple[int, Row]]:
    """The summary of every step whose completions were kept."""
    scores: dict[int, list[Row]] = {}
    for row in _rows_before(log_dir / GENERATIONS, steps):
        scores.setdefault(row["step"], []).append(row)
    for step, rows in scores.items():
        rewards = [float(row["reward"]) for row in rows if row["reward"] is not None]
        yield (
            step,
            {
                "step": step,
                "mean_reward": sum(rewards) / len(rewards) if rewards else 0.0,
                "correct_count": sum(row["outcome"] == "right" for row in rows),
                "total_count": len(rewards),
                "condition": condition,
            },
        )


def _rows_before(path: Path, steps: int) -> list[Row]:
    """Whole rows of earlier steps; later ones will be written again."""
    if not path.exists():
        return []
    # Only a newline ends a row: completions hold other characters that Unicode calls line breaks.
    lines = path.read_bytes().split(b"\n")
    return [row for row in whole_rows(lines) if isinstance(row.get("step"), int) and row["step"] < steps]


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a log in one go."""
    draft = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    draft.write_bytes(text.encode("utf-8", "surrogatepass"))
    os.replace(draft, path)


def _list_steps(steps: Iterable[int]) -> str:
    """Steps as a reader counts them: step 3, or steps 0-4, 7."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"step{'s' if len(parts) > 1 or '-' in parts[0] else ''} {', '.join(parts)}"
