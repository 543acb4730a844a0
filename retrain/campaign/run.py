"""Runs a campaign: starts missing runs, monitors and records them, and stops them on a signal."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from retrain.advantages import CreditAssigner
from retrain.campaign.decide import EarlyStopping, stopped_early, summarize
from retrain.campaign.earlier import check_earlier, choose_folder, find_edits
from retrain.campaign.manifest import Manifest, now
from retrain.campaign.plan import Run, find_idle, find_limits, name_conditions, plan_runs, runs_at_once
from retrain.campaign.processes import Executor, LocalProcesses, RunExit
from retrain.campaign.progress import (
    DONE,
    RunProgress,
    finished_steps,
    is_finished,
    is_locked,
    read_progress,
    read_tail,
    seconds_left,
    taking_turns,
)
from retrain.campaign.screen import Screen, format_rate, format_seconds
from retrain.campaign.shared import SharedModelProcess
from retrain.campaign.squeezing import FirstRunAnalysis, check_analysis
from retrain.checks.connections import announce_wait
from retrain.checks.preflight import check_before_loading, check_files_of_problems, find_shared_problems
from retrain.checks.processes import check_devices
from retrain.checks.unsupported import check_supported
from retrain.config import TrainConfig, dump_config
from retrain.errors import ConfigError, MissingExtraError, PluginError
from retrain.losses import build_loss
from retrain.runtime.interrupts import INTERRUPTED, SIGNALS
from retrain.runtime.text import list_some, plural, shorten_path
from retrain.storage.aside import CONFIG_FILE, holds_run, require_unoccupied, step_aside
from retrain.storage.checkpoint import explain_write_error, replace_file
from retrain.storage.folder import lock_folder
from retrain.storage.logs import EVALS, MANIFEST, METRICS
from retrain.types import JsonObject

POLL_S = 0.2
# Time for runs to save a checkpoint after a signal before they are killed.
GRACE_S = 8.0


def run_campaign(config: TrainConfig, force_resume: bool = False, source: str = "the campaign") -> int:
    """Run the missing runs of a campaign; returns the exit code."""
    folder, is_resumed = choose_folder(config), bool(config.resume.from_)
    # The folder to resume is the campaign's; a run that has not begun resumes nothing.
    config = config.model_copy(update={"resume": type(config.resume)()})
    runs = plan_runs(config, folder, source)
    absent_servers: set[str] = set()
    conditions = {run.condition: run.config for run in runs}
    runs_here = config.campaign is not None and config.campaign.executor == "local"
    _check_conditions(conditions, runs_here, absent_servers)
    with _rejecting_plugins():
        check_files_of_problems(list(conditions.values()))
    check_analysis(config, runs, folder)
    earlier = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    if earlier is not None and not force_resume:
        check_earlier(earlier, config, runs, is_resumed)
    running = [run.name for run in runs if is_locked(run.folder)]
    if running:
        raise ConfigError(f"{running[0]} of {folder} is still running.  Try: wait for it, or stop it")
    screen = Screen()
    for line in sorted(absent_servers):
        screen.log(line)
    executor = build_executor(config, folder, screen.log)
    if earlier is None:
        require_unoccupied(folder)
        if holds_run(folder) and not is_locked(folder):
            step_aside(folder, screen.log)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise explain_write_error(error, folder) from error
    with lock, _catch_signals() as signals, screen:
        manifest = earlier or Manifest(folder)
        replace_file(folder / CONFIG_FILE, dump_config(config))
        manifest.begin(config, runs)
        return Campaign(config, runs, manifest, executor, screen).run(signals)


def _check_conditions(conditions: Mapping[str, TrainConfig], runs_here: bool, absent_servers: set[str]) -> None:
    """Raise for what keeps a condition from running, with the names of those that it concerns."""
    problems: dict[str, list[str]] = {}
    for name, config in conditions.items():
        try:
            check_supported(config)
            if runs_here:
                check_devices(config)
                announce_wait(config, absent_servers.add)
                CreditAssigner(config)
                build_loss(config.loss, config.plugins.search_paths)
            check_before_loading(config)
        except (ConfigError, MissingExtraError, PluginError) as error:
            problems.setdefault(str(error), []).append(name)
    if problems:
        raise ConfigError("\n".join(name_conditions(problems, len(conditions))))


@contextmanager
def _rejecting_plugins() -> Iterator[None]:
    """Before the first run, what does not load is a configuration error."""
    try:
        yield
    except PluginError as error:
        error.exit_code = ConfigError.exit_code
        raise


class Campaign:
    """One session of a campaign."""

    def __init__(
        self, config: TrainConfig, runs: Sequence[Run], manifest: Manifest, executor: Executor, screen: Screen
    ) -> None:
        assert config.campaign is not None
        self.settings = config.campaign
        self.manifest = manifest
        self.executor = executor
        self.screen = screen
        self.runs = {run.name: run for run in runs}
        self.pending = [run for run in runs if not is_finished(run.folder, run.max_steps)]
        self.running: dict[str, float] = {}
        """Start time of each run."""
        self.next_start = 0.0
        self.early_stopping = EarlyStopping(runs, manifest) if self.settings.stop_when else None
        self.squeeze = FirstRunAnalysis(config, manifest)
        self.slots = runs_at_once(config.campaign, len(runs))

    def run(self, signals: list[int]) -> int:
        """Run until everything is done or a signal arrives."""
        self._announce()
        self._skip_decided()
        self._begin_missing_analysis()
        try:
            while (self.pending or self.running or self.squeeze.is_running) and not signals:
                self._start_some()
                for exited in self.executor.poll():
                    self._record_exit(exited)
                self.squeeze.collect(self.screen.log)
                self._show()
                time.sleep(POLL_S)
            if signals:
                self._stop(signals)
        finally:
            # No run outlives the session.
            self.executor.kill()
            self.executor.close()
        return self._conclude(stopped=bool(signals))

    def _announce(self) -> None:
        done = len(self.runs) - len(self.pending)
        for run in self.runs.values():
            was_finished = self.manifest[run.name]["status"] == "finished"
            if run not in self.pending and not was_finished:
                # It ended after an earlier session was killed.
                self.manifest.update(run.name, status="finished", **final_metrics(run.folder))
            elif run in self.pending and was_finished:
                # It got more steps, or its folder was deleted.
                self.manifest.update(run.name, status="interrupted" if finished_steps(run.folder) > 0 else "pending")
        folder = shorten_path(self.manifest.folder)
        self.screen.log(f"Campaign of {plural(len(self.runs), 'run')} in {folder}; {done} already done.")
        finished = [record["name"] for record in self.manifest.table["runs"] if record["status"] == "finished"]
        if others := [name for name in finished if name not in self.runs]:
            named = list_some(others)
            self.screen.log(
                f"Finished runs that the configuration lacks stay in the folder and in comparisons: {named}."
            )
        for warning in find_edits(list(self.runs.values())):
            self.screen.log(f"Warning: {warning}.")
        conditions = {run.condition: run.config for run in self.runs.values()}
        for warning in find_shared_problems(list(conditions.values())):
            self.screen.log(f"Warning: {warning}")
        for condition, config in conditions.items():
            for note in find_idle(config):
                self.screen.log(f"Note: {condition}: {note}")
        for note in find_limits(list(self.runs.values()), self.settings):
            self.screen.log(f"Note: {note}.")
        if self.squeeze.config.squeeze and not any(config.model.lora_rank for config in conditions.values()):
            self.screen.log("Note: [squeeze] is not used: no run trains an adapter.")

    def _begin_missing_analysis(self) -> None:
        """Analyze the first run that finished in an earlier session, if that session ended before its analysis."""
        finished = [name for name in self.runs if self.manifest[name]["status"] == "finished"]
        # A run that ended after its session was killed has no time.
        for name in sorted(finished, key=lambda name: self.manifest[name].get("ended") or now()):
            self.squeeze.begin(self.runs[name])

    def _start_some(self) -> None:
        while self.pending and len(self.running) < self.slots and time.monotonic() >= self.next_start:
            run = self.pending.pop(0)
            attempts = self.manifest[run.name]["attempts"] + 1
            self.executor.start(run)
            self.running[run.name] = time.monotonic()
            self.manifest.update(run.name, status="running", attempts=attempts, started=now(), error=None)
            self.screen.log(f"{run.name}: started")
            if self.settings.parallel:
                self.next_start = time.monotonic() + self.settings.stagger_seconds

    def _record_exit(self, exited: RunExit, stopped: bool = False) -> None:
        run, seconds = self.runs[exited.name], time.monotonic() - self.running.pop(exited.name)
        # A run may be killed after it has recorded its end.
        if exited.exit_code == 0 or is_finished(run.folder, run.max_steps):
            status = "finished"
        else:
            status = "interrupted" if stopped or exited.exit_code == INTERRUPTED else "failed"
        final = final_metrics(run.folder)
        error = exited.error or _describe_exit(exited.exit_code)
        self.manifest.update(
            run.name,
            status=status,
            ended=now(),
            seconds=round(self.manifest[run.name]["seconds"] + seconds, 3),
            exit_code=exited.exit_code,
            error=error if status == "failed" else None,
            **final,
        )
        rate = format_rate((final["final"] or {}).get("correct_rate"))
        self.screen.log(f"{run.name}: {status} at step {final['step']} in {format_seconds(seconds)}, correct {rate}")
        if status == "finished":
            self.squeeze.begin(run)
            self._skip_decided()
        if status == "failed":
            self.screen.log(f"  {error}\n  See {shorten_path(run.folder)}")

    def _skip_decided(self) -> None:
        if self.early_stopping is None:
            return
        for sentence in self.early_stopping.update():
            self.screen.log(sentence)
        decided = [run for run in self.pending if self.early_stopping.is_settled(run.condition)]
        self.pending = [run for run in self.pending if run not in decided]
        self.early_stopping.table["skipped"] = sorted(
            {*self.early_stopping.table["skipped"], *(run.name for run in decided)}
        )
        for run in decided:
            self.manifest.update(run.name, status="skipped")

    def _stop(self, signals: list[int]) -> None:
        """Let runs save and end; after a time limit or a second signal they are killed."""
        self.screen.log("Stopping: every run saves a checkpoint. Press Ctrl-C again to stop immediately.")
        self.executor.stop()
        deadline = time.monotonic() + GRACE_S
        while self.running:
            for exited in self.executor.poll():
                self._record_exit(exited, stopped=True)
            if time.monotonic() > deadline or len(signals) > 1:
                self.executor.kill()
            time.sleep(POLL_S)

    def _show(self, force: bool = False) -> None:
        if not self.screen.is_due() and not force:
            return
        progress = self._progress()
        # Runs that share a model step in turn.
        left = seconds_left(list(progress.values()), 1 if self.settings.share_model else self.slots)
        self.screen.show(progress, left)

    def _progress(self) -> dict[str, RunProgress]:
        """The progress of each run, with the status of the manifest."""
        shown = {}
        for name, run in self.runs.items():
            started = self.running.get(name)
            shown[name] = replace(
                read_progress(run.folder).since_start(None if started is None else time.monotonic() - started),
                # The status of an earlier session, if it has to be resumed.
                status="pending" if run in self.pending else self.manifest[name]["status"],
                max_steps=run.max_steps,
                elapsed_seconds=self._elapsed(name),
                attempts=self.manifest[name]["attempts"],
            )
        return taking_turns(shown) if self.settings.share_model else shown

    def _elapsed(self, name: str) -> float:
        """Run time over all attempts."""
        current = time.monotonic() - self.running[name] if name in self.running else 0.0
        return float(self.manifest[name]["seconds"]) + current

    def _conclude(self, stopped: bool) -> int:
        statuses = [self.manifest[name]["status"] for name in self.runs]
        failed = [name for name in self.runs if self.manifest[name]["status"] == "failed"]
        self.squeeze.collect(self.screen.log)
        complete = all(status in DONE for status in statuses) and not self.squeeze.is_running
        self.manifest.end("finished" if complete else "interrupted" if stopped else "failed")
        self._show(force=True)
        folder = shorten_path(self.manifest.folder)
        if not stopped:
            for line in (*summarize(self.manifest, self.screen.width), *stopped_early(self.manifest.table)):
                self.screen.log(line)
        if complete:
            skipped = statuses.count("skipped")
            others = f", {skipped} skipped" if skipped else ""
            self.screen.log(f"Done: {plural(len(statuses) - skipped, 'run')}{others} in {folder}.")
            self.screen.log(f"To view it: retrain ui {shlex.quote(folder)}")
            return 0
        if failed:
            self.screen.log(f"{len(failed)} of {plural(len(statuses), 'run')} failed: {', '.join(failed)}.")
        if self.squeeze.is_running:
            self.screen.log("The LoRA rank analysis is not finished; a resume begins it again.")
        self.screen.log(f"To resume: retrain --resume {shlex.quote(folder)}")
        return INTERRUPTED if stopped else 1


def _describe_exit(code: int) -> str:
    """How a process ended that printed no error."""
    return f"It was ended by signal {-code}." if code < 0 else f"exit code {code}"


def final_metrics(folder: Path) -> JsonObject:
    """The last step of a run, its metrics and its last evaluation."""
    steps, evaluations = read_tail(folder / METRICS), read_tail(folder / EVALS)
    progress = read_progress(folder, checks=False)
    last = evaluations[-1] if evaluations else None
    return {
        "step": progress.step,
        "final": steps[-1] if steps else None,
        "evaluation": {key: value for key, value in last.items() if key not in ("correct", "counted")}
        if last
        else None,
    }


def build_executor(config: TrainConfig, folder: Path, log: Callable[[str], None]) -> Executor:
    """Where the runs execute."""
    assert config.campaign is not None
    if config.campaign.executor == "ray":
        from retrain.campaign.ray import RayCluster  # noqa: PLC0415  (an optional extra)

        return RayCluster(config.campaign.gpus_per_run, log)
    if config.campaign.share_model:
        return SharedModelProcess(folder)
    return LocalProcesses()


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collect signals in a list instead of raising KeyboardInterrupt."""
    signals: list[int] = []
    # Under nohup the campaign must outlive the terminal.
    wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, frame: signals.append(number)) for number in wanted}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
