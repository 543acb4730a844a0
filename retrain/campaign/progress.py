"""How a run stands, read from its folder: whether a process holds it, how far it is, its last numbers."""

from __future__ import annotations

import fcntl
import json
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.storage.checkpoint import STATE_FILE
from retrain.storage.folder import CONFIG_FILE, LOCK_FILE
from retrain.storage.logs import EVALS, METRICS, whole_rows

# Enough for the last steps of any log, however long it has become.
_TAIL_BYTES = 1 << 17
# Steps that an estimate of the time left is made from.
_RECENT = 20


@dataclass(frozen=True)
class RunProgress:
    """A run at one moment; None where nothing is known."""

    status: str
    """running, finished, interrupted, dead (its process went without a word) or pending (not begun)."""
    step: int = 0
    max_steps: int | None = None
    condition: str = ""
    seed: int | None = None
    correct_rate: float | None = None
    mean_reward: float | None = None
    held_out: float | None = None
    step_seconds: float | None = None
    quiet_seconds: float | None = None
    """Time since it last logged a step."""
    turns: int = 1
    """Runs that step in turn over one model, itself among them."""
    elapsed_seconds: float = 0.0
    """Time since it was started, over all attempts, as far as its campaign knows."""
    attempts: int = 1

    @property
    def overhead_seconds(self) -> float | None:
        """What one start costs beside the steps: loading before the first, evaluating after the last."""
        if self.step == 0 or self.step_seconds is None or not self.elapsed_seconds:
            return None
        waiting = self.quiet_seconds or 0.0 if self.status == "running" else 0.0
        stepping = self.step * self.step_seconds
        return max(0.0, self.elapsed_seconds - stepping - waiting) / max(1, self.attempts)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to its end at the pace of the last steps; None when it is not running."""
        if self.status != "running" or self.step_seconds is None or self.max_steps is None:
            return None
        return max(0.0, (self.max_steps - self.step) * self.step_seconds * self.turns - (self.quiet_seconds or 0.0))


def read_progress(folder: Path) -> RunProgress:
    """Look at a run's folder without touching it."""
    config, state = _read_config(folder), _read_state(folder)
    steps = read_tail(folder / METRICS)
    last = steps[-1] if steps else {}
    training = config.get("training", {})
    # With epochs, the number of steps is known once the data is, so it is in the state and not in the file.
    max_steps = state.get("max_steps") if training.get("epochs") else training.get("max_steps")
    done = max(int(state.get("step", 0)), int(last.get("step", -1)) + 1)
    times = [row["step_time_s"] for row in steps[-_RECENT:] if isinstance(row.get("step_time_s"), float)]
    evaluations = read_tail(folder / EVALS)
    return RunProgress(
        status=_status(folder, state),
        step=done,
        max_steps=max_steps,
        condition=str(last.get("condition") or state.get("condition") or ""),
        seed=training.get("seed"),
        correct_rate=last.get("correct_rate"),
        mean_reward=last.get("mean_reward"),
        held_out=evaluations[-1].get("eval_pass_at_1") if evaluations else None,
        step_seconds=sum(times) / len(times) if times else None,
        quiet_seconds=_age(folder / METRICS),
    )


def taking_turns(runs: Mapping[str, RunProgress]) -> dict[str, RunProgress]:
    """The same runs, of which only one steps at a time; what they waited for each other is no cost of starting."""
    running = sum(run.status == "running" for run in runs.values())
    return {name: replace(run, turns=max(1, running), elapsed_seconds=0.0) for name, run in runs.items()}


def seconds_left(runs: Sequence[RunProgress], at_once: int) -> float | None:
    """Starts and steps left of runs that go on or are to come, at what they took so far, so many runs at a time."""
    paces = [run.step_seconds for run in runs if run.step_seconds is not None]
    overheads = [run.overhead_seconds for run in runs if run.overhead_seconds is not None]
    open_runs = [run for run in runs if run.status in ("running", "pending")]
    if not paces:
        return None
    steps = sum((run.max_steps or 0) - run.step for run in open_runs)
    start = sum(overheads) / len(overheads) if overheads else 0.0
    starts = sum(max(0.0, start - run.elapsed_seconds) for run in open_runs if run.step == 0)
    return (steps * sum(paces) / len(paces) + starts) / max(1, min(at_once, len(open_runs)))


def is_finished(folder: Path, max_steps: int) -> bool:
    """Whether a run took all its steps and said so."""
    state = _read_state(folder)
    return state.get("status") == "finished" and state.get("step", 0) >= max_steps


def is_held(folder: Path) -> bool:
    """Whether a living process holds the folder."""
    path = folder / LOCK_FILE
    try:
        owner = path.read_text().strip()
        if not owner.isdigit() or not _is_alive(int(owner)):
            return False
        # The number may belong to another process by now. Only the lock tells, and it is tried only here, because
        # trying it takes it for an instant.
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The last whole rows of a JSONL file; a torn last line is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # Where the file was entered in the middle, its first line is the end of one.
    return list(whole_rows(lines[1 if size > _TAIL_BYTES else 0 : -1]))


def _status(folder: Path, state: dict[str, Any]) -> str:
    if is_held(folder):
        return "running"
    if state.get("status") == "running" or not state:
        begun = bool(state) or (_age(folder / METRICS) is not None)
        return "dead" if begun else "pending"
    return str(state.get("status"))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
