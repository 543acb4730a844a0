"""`retrain status`: the runs and campaigns in a folder, with status and progress."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from retrain.analysis.health import help_line, worst
from retrain.campaign.manifest import Record, read_table
from retrain.campaign.plan import RUNS
from retrain.campaign.progress import (
    RunProgress,
    describe_done,
    is_locked,
    read_progress,
    read_trl_progress,
    seconds_left,
    taking_turns,
)
from retrain.campaign.screen import COLUMNS, cells, format_seconds
from retrain.cli.console import print_json, print_line, print_table
from retrain.cli.health import print_health
from retrain.errors import ConfigError, RetrainError
from retrain.storage.aside import CONFIG_FILE, RUN_FILES
from retrain.storage.checkpoint import STATE_FILE, Checkpoints
from retrain.storage.folder import SEARCH_DEPTH, subfolders
from retrain.storage.logs import MANIFEST, METRICS


@dataclass(frozen=True)
class Entry:
    """A single run, or a campaign with its runs."""

    path: str
    kind: str
    status: str
    live: bool
    runs: dict[str, RunProgress]
    problem: str = ""
    in_turn: bool = False
    """Whether its runs share a model, so that only one of them trains at a time."""

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until all runs are done, at the current number of parallel runs."""
        if not self.live:
            return None
        if self.kind == "run":
            return next((run.eta_seconds for run in self.runs.values()), None)
        running = sum(run.status == "running" for run in self.runs.values())
        return seconds_left(list(self.runs.values()), 1 if self.in_turn else running)


@click.command("status")
@click.argument("logs", nargs=-1, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(logs: tuple[str, ...], as_json: bool) -> int:
    """List the runs and campaigns in the folders LOGS (default: ./logs), the one with the latest step last.

    An unfinished run is `interrupted` if it was stopped, `failed` if it ended with an error, which is shown below the
    table, and `dead` if it did neither and no process holds the lock on its folder. Runs of `retrain grpo` are shown as
    of TRL's last checkpoint: finished or unfinished.

    \b
    The JSON is a list of objects with these keys:
      path         the folder
      kind         run or campaign
      status       as in the table
      live         whether a process holds its lock
      in_turn      whether its runs share a model and train in turn
      eta_seconds  time left
      problem      why it cannot be read, or empty
      runs         by name: status, step, max_steps, condition, seed,
                   correct_rate, mean_reward, held_out, step_seconds,
                   quiet_seconds, turns, activity, eta_seconds, health,
                   error, attempts, and for runs of a campaign:
                   elapsed_seconds (otherwise null)
    health is a list of checks: name, level, value, rule, step (the first).
    """
    entries = [entry for folder in logs or ("logs",) for entry in find_entries(Path(folder).expanduser())]
    if as_json:
        print_json([describe(entry) for entry in entries])
        return 0
    if not entries:
        click.echo(f"There are no runs in {', '.join(logs) or 'logs'}.")
    for entry in entries:
        print_entry(entry)
    return 0


def find_entries(logs: Path) -> list[Entry]:
    """All runs and campaigns below a folder, the one with the latest step last."""
    if not logs.is_dir():
        raise ConfigError(f"there is no folder {logs}.  Try: the parent folder of [logging] log_dir")
    return sorted(_search(logs, logs, SEARCH_DEPTH), key=_last_step)


def _find_progress(folder: Path) -> RunProgress | None:
    """The progress of the run in a folder; None if there is none. A run of TRL has no config.toml."""
    has_config = (folder / CONFIG_FILE).is_file()
    if not has_config and (progress := read_trl_progress(folder)):
        return progress
    is_run = has_config and any((folder / name).exists() for name in RUN_FILES)
    return read_progress(folder) if is_run or is_locked(folder) else None


def _search(folder: Path, root: Path, depth: int) -> Iterator[Entry]:
    if (folder / MANIFEST).is_file():
        yield read_campaign(folder)
    elif progress := _find_progress(folder):
        yield Entry(str(folder), "run", progress.status, progress.status == "running", {folder.name: progress})
    elif depth:
        for path in subfolders(folder, root):
            yield from _search(path, root, depth - 1)


def read_campaign(folder: Path) -> Entry:
    """Read a campaign from its manifest and the folders of its runs."""
    live = is_locked(folder)
    try:
        table = read_table(folder)
        runs = {record["name"]: _read_run(folder, record) for record in table["runs"]}
        status, in_turn = table["status"], bool(table["config"]["campaign"]["share_model"])
    except (RetrainError, KeyError, TypeError, ValueError) as error:
        return Entry(str(folder), "campaign", "unreadable", live, {}, str(error))
    if status == "running" and not live:
        status = "dead"
    if status == "finished" and any(run.status == "pending" for run in runs.values()):
        status = "interrupted"  # runs were removed
    return Entry(str(folder), "campaign", status, live, taking_turns(runs) if in_turn else runs, in_turn=in_turn)


def _read_run(folder: Path, record: Record) -> RunProgress:
    progress = read_progress(folder / record["folder"])
    status = record["status"]
    # The manifest covers failures and runs on other machines; the lock shows whether a local run is alive.
    if status == "running" and progress.status != "running" and not is_locked(folder):
        # A run that got more steps and was killed while it loaded has recorded only its earlier end.
        is_short = progress.step < record["max_steps"]
        status = "dead" if progress.status == "finished" and is_short else progress.status
    if status in ("finished", "interrupted") and not (folder / record["folder"]).is_dir():
        status = "pending"  # removed, so that a resume starts it again
    started = _since_start(record, status)
    return replace(
        progress.since_start(started),
        status=status,
        condition=record["condition"],
        max_steps=record["max_steps"],
        elapsed_seconds=float(record["seconds"]) + (started or 0.0),
        attempts=record["attempts"],
        error=progress.error or _find_error(record.get("error") or "") if status == "failed" else "",
    )


def _find_error(stderr: str) -> str:
    """The line with the error among the last lines that a run printed."""
    lines = stderr.splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), (lines or [""])[-1])


def _since_start(record: Record, status: str) -> float | None:
    """Seconds since a running run was started in this session."""
    if status != "running" or not record.get("started"):
        return None
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(record["started"])).total_seconds())


def describe(entry: Entry) -> dict[str, object]:
    """An entry as JSON."""
    return asdict(entry) | {
        "runs": {name: _describe_run(run) for name, run in entry.runs.items()},
        "eta_seconds": entry.eta_seconds,
    }


def _describe_run(run: RunProgress) -> dict[str, object]:
    activity = run.activity if run.status == "running" else ""
    return asdict(run) | {"activity": activity, "eta_seconds": run.eta_seconds}


def print_entry(entry: Entry) -> None:
    """Print a heading and a table."""
    click.echo(heading(entry))
    if entry.problem:
        click.echo(f"  {entry.problem}")
    rows = [(name, *cells(run)) for name, run in entry.runs.items()]
    if rows:
        print_table(COLUMNS, rows, header=True)
    for text in error_lines(entry):
        print_line(f"  {text}")
    if text := resume_line(entry):
        click.echo(f"  {text}")
    for name, run in entry.runs.items():
        # For a run without problems, the table suffices.
        if worst(run.health):
            print_health(f"  {name}: ", run.health)
    if text := help_line([check for run in entry.runs.values() for check in run.health]):
        print_line(f"  {text}")


def heading(entry: Entry) -> str:
    """Path, kind, status and progress in one line."""
    counts = f", {describe_done(entry.runs.values())}" if entry.kind == "campaign" else ""
    left = f", {format_seconds(entry.eta_seconds)} left" if entry.eta_seconds is not None else ""
    states = {run.state for run in entry.runs.values()}
    state = states.pop() if entry.status == "running" and len(states) == 1 else entry.status
    return f"{entry.path}: {entry.kind}, {state}{counts}{left}"


def error_lines(entry: Entry) -> list[str]:
    """Why its runs failed."""
    return [f"{name} failed: {run.error}" for name, run in entry.runs.items() if run.error]


def resume_line(entry: Entry) -> str:
    """The command that continues what ended early; empty for anything else."""
    if entry.status not in ("dead", "interrupted", "failed"):
        return ""
    if entry.kind == "run" and not Checkpoints(Path(entry.path), 1, print).steps():
        return "It ended before its first checkpoint: start it again."
    return f"To resume: retrain --resume {shlex.quote(entry.path)}"


def _last_step(entry: Entry) -> float:
    """When it last logged a step; before the first step, when it began. Reports and cards do not change it."""
    folder = Path(entry.path)
    steps = [folder / METRICS, *folder.glob(f"{RUNS}/*/{METRICS}")]
    saved_by_trl = [folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")]
    for paths in (steps, [folder / CONFIG_FILE], saved_by_trl, [folder]):
        if times := [time for path in paths if (time := _changed(path)) is not None]:
            return max(times)
    return 0.0


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
