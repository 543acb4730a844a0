"""The progress of a run, read from its folder: status, step, latest metrics."""

from __future__ import annotations

import fcntl
import os
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from retrain.analysis.health import METRIC_KEYS, Check, check_health
from retrain.runtime.text import plural
from retrain.storage.aside import CONFIG_FILE, LOCK_FILE
from retrain.storage.checkpoint import STATE_FILE, last_edit, read_state
from retrain.storage.logs import EVALS, METRICS, has_step, only_evaluations, parse_rows
from retrain.storage.publishing import is_alive
from retrain.storage.tail import Tail
from retrain.types import JsonObject

Table = JsonObject
# Enough for the last steps of a log of any length.
_TAIL_BYTES = 1 << 17
_CHECKED_KEYS = ("step", "uncertainty_kind", *METRIC_KEYS)
# Number of last steps that the ETA is based on.
_RECENT_STEPS = 20


DONE = ("finished", "skipped")
"""Statuses of runs that a campaign does not start again."""


@dataclass(frozen=True)
class RunProgress:
    """The state of a run; None where unknown."""

    status: str
    """running, finished, interrupted, failed (it ended with an error), dead (the process disappeared), pending (not
    started) or unreadable.

    A run of TRL is running, finished or unfinished: nothing in its folder says why it ended.
    """
    step: int = 0
    max_steps: int | None = None
    condition: str = ""
    seed: int | None = None
    correct_rate: float | None = None
    mean_reward: float | None = None
    held_out: float | None = None
    step_seconds: float | None = None
    quiet_seconds: float | None = None
    """Time since the last logged step, or since the run was resumed after it."""
    turns: int = 1
    """Number of running runs that share one model, including this one."""
    elapsed_seconds: float | None = None
    """Run time over all attempts, as recorded by the campaign; None for a run that belongs to none."""
    attempts: int = 1
    health: tuple[Check, ...] = ()
    """Empty if they were not read."""
    activity: str = ""
    """What a running run does outside of steps: loading, before the first, or evaluating, after the last."""
    error: str = ""
    """Why a failed run failed, in one line."""

    @property
    def state(self) -> str:
        """The status, or for a running run what it is doing."""
        return self.activity or self.status if self.status == "running" else self.status

    def since_start(self, seconds: float | None) -> RunProgress:
        """The same, if this session started it so long ago: its last step may be one of an earlier session."""
        if self.quiet_seconds is None or seconds is None:
            return self
        return replace(self, quiet_seconds=min(self.quiet_seconds, seconds))

    @property
    def overhead_seconds(self) -> float | None:
        """Time per attempt outside of steps: loading before the first, evaluation after the last."""
        if self.step == 0 or self.step_seconds is None or not self.elapsed_seconds:
            return None
        waiting = self.quiet_seconds or 0.0 if self.status == "running" else 0.0
        stepping = self.step * self.step_seconds
        return max(0.0, self.elapsed_seconds - stepping - waiting) / max(1, self.attempts)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end at the pace of the last steps; None when not running."""
        if self.state not in ("running", "loading") or self.step_seconds is None or self.max_steps is None:
            return None
        # A run that loads is not in a step yet.
        in_step = 0.0 if self.state == "loading" else self.quiet_seconds or 0.0
        return max(0.0, (self.max_steps - self.step) * self.step_seconds * self.turns - in_step)


def describe_done(runs: Iterable[RunProgress]) -> str:
    """How many of a campaign's runs are done, and how many of those it skipped."""
    statuses = [run.status for run in runs]
    skipped = statuses.count("skipped")
    others = f" ({skipped} skipped)" if skipped else ""
    return f"{sum(status in DONE for status in statuses)} of {plural(len(statuses), 'run')} done{others}"


def read_progress(folder: Path, checks: bool = True) -> RunProgress:
    """Read the progress of a run without changing its folder, whatever its files contain.

    The health `checks` read all of its log, the rest only the end.
    """
    try:
        return _checked(_read_run(folder, checks))
    except Exception:
        return RunProgress("running" if is_locked(folder) else "unreadable")


def _checked(progress: RunProgress) -> RunProgress:
    """The same progress; raises if a number is something else."""
    numbers = (progress.max_steps, progress.seed, progress.correct_rate, progress.mean_reward, progress.held_out)
    if not isinstance(progress.step, int) or not all(isinstance(number, int | float | None) for number in numbers):
        raise TypeError("a number is something else")
    return progress


def _read_run(folder: Path, checks: bool) -> RunProgress:
    config, state = _read_config(folder), read_state(folder)
    steps = [row for row in read_tail(folder / METRICS) if has_step(row)]
    last = steps[-1] if steps else {}
    training = config.get("training", {})
    # With epochs, the number of steps is known once the data is, so it is in the state and not in the file.
    max_steps = state.get("max_steps") if training.get("epochs") else training.get("max_steps")
    done = max(int(state.get("step", 0)), int(last.get("step", -1)) + 1)
    times = [row["step_time_s"] for row in steps[-_RECENT_STEPS:] if isinstance(row.get("step_time_s"), float)]
    evaluations = list(only_evaluations(read_tail(folder / EVALS)))
    is_last, is_evaluated = done == max_steps, bool(config.get("eval", {}).get("every"))
    status = _status(folder, state)
    is_loading = _is_loading(folder)
    return RunProgress(
        status=status,
        step=done,
        # One that loads in the folder of a finished run writes how many steps it will take when it has loaded.
        max_steps=None if is_loading and is_last and status == "running" else max_steps,
        condition=str(last.get("condition") or state.get("condition") or ""),
        seed=training.get("seed"),
        correct_rate=last.get("correct_rate"),
        mean_reward=last.get("mean_reward"),
        held_out=evaluations[-1].get("eval_pass_at_1") if evaluations else None,
        step_seconds=sum(times) / len(times) if times else None,
        quiet_seconds=_quiet_seconds(folder),
        health=_check(folder, training.get("max_tokens"), state) if checks else (),
        activity="loading" if is_loading else "evaluating" if is_last and is_evaluated else "",
        error=str(state.get("error", "")) if status == "failed" else "",
    )


def _quiet_seconds(folder: Path) -> float | None:
    """Seconds since the last sign of progress: a logged step or, for a live run, locking its folder or the end of
    loading."""
    names = (METRICS, LOCK_FILE, CONFIG_FILE) if is_locked(folder) else (METRICS,)
    ages = [_age(folder / name) for name in names]
    return min(age for age in ages if age is not None) if ages[0] is not None else None


def read_trl_progress(folder: Path) -> RunProgress | None:
    """The progress of a run of TRL (`retrain grpo`) at its last checkpoint or its end; None where there is neither."""
    states = [path for path in (*folder.glob(f"checkpoint-*/{STATE_FILE}"), folder / STATE_FILE) if path.is_file()]
    newest = min(states, key=lambda path: _age(path) or 0.0, default=folder / STATE_FILE)
    state = read_state(newest.parent)
    if "global_step" not in state:
        return None
    try:
        progress = _checked(_read_trl_state(state, newest))
    except Exception:
        return RunProgress("unreadable")
    return replace(progress, status="running") if is_locked(folder) else progress


def _read_trl_state(state: Table, path: Path) -> RunProgress:
    step, max_steps = state["global_step"], state.get("max_steps")
    rewards = [row["reward"] for row in state.get("log_history", ()) if "reward" in row]
    return RunProgress(
        status="finished" if step == max_steps else "unfinished",
        step=step,
        max_steps=max_steps,
        mean_reward=rewards[-1] if rewards else None,
        quiet_seconds=_age(path),
    )


def taking_turns(runs: Mapping[str, RunProgress]) -> dict[str, RunProgress]:
    """The same runs when they share a model: only one steps at a time, and waiting is not counted as overhead."""
    running = sum(run.status == "running" for run in runs.values())
    return {name: replace(run, turns=max(1, running), elapsed_seconds=None) for name, run in runs.items()}


def seconds_left(runs: Sequence[RunProgress], at_once: int) -> float | None:
    """Time for the remaining steps and starts of all open runs at the observed pace, `at_once` runs in parallel.

    None if there is no pace yet, or if only evaluations are left.
    """
    paces = [run.step_seconds for run in runs if run.step_seconds is not None]
    overheads = [run.overhead_seconds for run in runs if run.overhead_seconds is not None]
    # An interrupted run of a live campaign waits for its turn to resume.
    open_runs = [run for run in runs if run.status in ("running", "pending", "interrupted")]
    if not paces or (open_runs and all(run.state == "evaluating" for run in open_runs)):
        return None
    steps = sum((run.max_steps or 0) - run.step for run in open_runs)
    start = sum(overheads) / len(overheads) if overheads else 0.0
    starts = sum(_start_left(run, start) for run in open_runs)
    return (steps * sum(paces) / len(paces) + starts) / max(1, min(at_once, len(open_runs)))


def _start_left(run: RunProgress, start: float) -> float:
    """What is left of a start that takes this many seconds."""
    if run.status != "running":
        return start
    if run.step == 0:
        return max(0.0, start - (run.elapsed_seconds or 0.0))
    return max(0.0, start - (run.quiet_seconds or 0.0)) if run.state == "loading" else 0.0


def is_finished(folder: Path, max_steps: int) -> bool:
    """Whether a run made all its steps and recorded its end."""
    return finished_steps(folder) >= max_steps


def finished_steps(folder: Path) -> int:
    """The steps of the last checkpoint of a run that recorded its end; -1 if it did not."""
    state = read_state(folder)
    step = state.get("step", 0)
    return step if state.get("status") == "finished" and isinstance(step, int) else -1


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of the folder."""
    path = folder / LOCK_FILE
    try:
        owner = path.read_text().strip()
        if not owner.isdecimal() or not is_alive(int(owner)):
            return False
        # The process id may have been reused, so the lock decides. It is tried last, because trying takes it briefly.
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False


class _GrowingLog:
    """All rows of a log; of a step, only the values that checks need, as a live display may keep many runs."""

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.rows: list[Table] = []
        self.version = 0
        """Increases with every change of the rows."""

    def update(self) -> None:
        """Read what was appended since the last time."""
        if self.tail.has_changed():
            self.tail.rewind()
            self.rows = []
            self.version += 1
        while lines := self.tail.read():
            rows = (row for row in parse_rows(lines) if has_step(row))
            if self.tail.path.name == METRICS:
                rows = ({key: row[key] for key in _CHECKED_KEYS if key in row} for row in rows)
            self.rows += rows
            self.version += 1


class _Checks:
    """The health checks of a run over all of its steps, made again when something has changed."""

    def __init__(self, folder: Path) -> None:
        self.metrics, self.evals = _GrowingLog(folder / METRICS), _GrowingLog(folder / EVALS)
        self.made_of: tuple[int | None, ...] = ()
        self.found: tuple[Check, ...] = ()

    def update(self, max_tokens: int | None, state: Table) -> tuple[Check, ...]:
        self.metrics.update()
        self.evals.update()
        steps, evaluations = self.metrics.rows, list(only_evaluations(self.evals.rows))
        if not steps:
            return ()
        edited_at = last_edit(state, steps[-1]["step"])
        made_of = (self.metrics.version, self.evals.version, max_tokens, edited_at)
        if made_of != self.made_of:
            self.found = tuple(check_health(steps, evaluations, max_tokens, edited_at))
            self.made_of = made_of
        return self.found


_checks: dict[str, _Checks] = {}
"""By folder: a live display asks for them every second."""


def _check(folder: Path, max_tokens: int | None, state: Table) -> tuple[Check, ...]:
    # A program may change its working directory between two calls.
    path = os.path.abspath(folder)
    if path not in _checks:
        _checks[path] = _Checks(Path(path))
    return _checks[path].update(max_tokens, state)


def read_tail(path: Path) -> list[Table]:
    """The last complete rows of a JSONL file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # Reading from the middle of the file, the first line is incomplete.
    return list(parse_rows(lines[1 if size > _TAIL_BYTES else 0 : -1]))


def _status(folder: Path, state: Table) -> str:
    if is_locked(folder):
        return "running"
    if state.get("status") == "running" or not state:
        started = bool(state) or (_age(folder / METRICS) is not None)
        return "dead" if started else "pending"
    return str(state.get("status"))


def _is_loading(folder: Path) -> bool:
    """Whether the process that holds the lock is still preparing the folder; it writes the configuration when done."""
    try:
        return (folder / LOCK_FILE).stat().st_mtime_ns > (folder / CONFIG_FILE).stat().st_mtime_ns
    except FileNotFoundError:
        return not (folder / CONFIG_FILE).exists()


def _read_config(folder: Path) -> Table:
    try:
        return _parse_toml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=512)
def _parse_toml(text: str) -> Table:
    """A campaign looks at its runs every second, whose configurations stay the same."""
    return tomllib.loads(text)


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
