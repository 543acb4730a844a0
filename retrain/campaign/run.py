"""Runs a campaign: starts what is missing, watches, records, and stops all of it when told to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from retrain.campaign.decide import EarlyLook, refuse_few_seeds, stopped_early, summarise
from retrain.campaign.manifest import MANIFEST, Manifest, now
from retrain.campaign.plan import Run, plan_runs
from retrain.campaign.processes import Ended, Executor, LocalProcesses
from retrain.campaign.progress import (
    RunProgress,
    is_finished,
    is_held,
    read_progress,
    read_tail,
    seconds_left,
    taking_turns,
)
from retrain.campaign.screen import Screen, format_rate, format_seconds
from retrain.campaign.shared import SharedModelProcess, refuse_unshared
from retrain.campaign.squeezing import FirstRunAnalysis
from retrain.checks.preflight import check_before_loading
from retrain.config import TrainConfig, dump_config, load_config
from retrain.config.absent import refuse_absent_parts
from retrain.config.options import options_by_path
from retrain.errors import CheckpointError, ConfigError
from retrain.runtime.devices import check_devices
from retrain.runtime.interrupts import SIGNALS
from retrain.runtime.ranks import refuse_alone
from retrain.runtime.version import version
from retrain.storage.checkpoint import explain_write_error
from retrain.storage.folder import CONFIG_FILE, lock_folder, meaningful_differences, step_aside, with_absolute_paths
from retrain.storage.logs import EVALS, METRICS

INTERRUPTED = 130
POLL_S = 0.2
# Runs are told to save and end; those that have not by then are killed, and go on from an earlier checkpoint.
GRACE_S = 8.0


def run_campaign(config: TrainConfig, force_resume: bool = False, source: str = "the campaign") -> int:
    """Run what is missing of a campaign; returns the exit code."""
    folder = choose_folder(config)
    runs = plan_runs(config, folder, source)
    for run in {run.condition: run for run in runs}.values():
        refuse_absent_parts(run.config)
        if config.campaign is not None and config.campaign.executor == "local":
            check_devices(run.config)
        refuse_alone(run.config)
        check_before_loading(run.config)
    if config.campaign is not None and config.campaign.stop_when:
        refuse_few_seeds(len(config.campaign.seeds))
    earlier = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    if earlier is not None and not force_resume:
        _refuse_other_campaign(earlier, runs)
    held = [run.name for run in runs if is_held(run.folder)]
    if held:
        raise ConfigError(f"{held[0]} of {folder} is still running on its own.  Try: wait for it, or stop it")
    screen = Screen()
    executor = build_executor(config, folder, runs, screen.say)
    if earlier is None and (folder / METRICS).exists() and not is_held(folder):
        screen.say(f"{folder} held an earlier run; it is now {step_aside(folder)}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise explain_write_error(error, folder) from error
    with lock, _told_to_stop() as told, screen:
        manifest = earlier or Manifest(folder)
        (folder / CONFIG_FILE).write_text(dump_config(_without_resume(config)), encoding="utf-8")
        manifest.begin(config, runs)
        return Campaign(config, runs, manifest, executor, screen).run(told)


class Campaign:
    """One session of work on a campaign's folder."""

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
        """When each of them was started."""
        self.next_start = 0.0
        self.early_look = EarlyLook(runs, manifest) if self.settings.stop_when else None
        self.squeeze = FirstRunAnalysis(config, manifest)
        at_once = self.settings.max_workers or len(runs)
        self.slots = at_once if self.settings.parallel or self.settings.share_model else 1

    def run(self, told: list[int]) -> int:
        """Until nothing is left, or a signal comes."""
        self._introduce()
        self._look()
        try:
            while (self.pending or self.running) and not told:
                self._start_some()
                for ended in self.executor.poll():
                    self._note_end(ended)
                self.squeeze.collect(self.screen.say)
                self._show()
                time.sleep(POLL_S)
            if told:
                self._stop(told)
        finally:
            # Whatever ended this session, no run outlives it.
            self.executor.kill()
            self.executor.close()
        return self._conclude(stopped=bool(told))

    def _introduce(self) -> None:
        done = len(self.runs) - len(self.pending)
        for run in self.runs.values():
            if run not in self.pending and self.manifest[run.name]["status"] != "finished":
                # It ended while nobody was there to write that down.
                self.manifest.note(run.name, status="finished", **final_numbers(run.folder))
        self.screen.say(f"Campaign of {len(self.runs)} runs in {self.manifest.folder}; {done} are done already.")

    def _start_some(self) -> None:
        while self.pending and len(self.running) < self.slots and time.monotonic() >= self.next_start:
            run = self.pending.pop(0)
            attempts = self.manifest[run.name]["attempts"] + 1
            self.executor.start(run)
            self.running[run.name] = time.monotonic()
            self.manifest.note(run.name, status="running", attempts=attempts, started=now(), error=None)
            self.screen.say(f"{run.name}: started")
            if self.settings.parallel:
                self.next_start = time.monotonic() + self.settings.stagger_seconds

    def _note_end(self, ended: Ended, stopped: bool = False) -> None:
        run, seconds = self.runs[ended.name], time.monotonic() - self.running.pop(ended.name)
        if ended.exit_code == 0:
            status = "finished"
        else:
            status = "interrupted" if stopped or ended.exit_code == INTERRUPTED else "failed"
        facts = final_numbers(run.folder)
        self.manifest.note(
            run.name,
            status=status,
            ended=now(),
            seconds=round(self.manifest[run.name]["seconds"] + seconds, 3),
            exit_code=ended.exit_code,
            error=ended.error if status == "failed" else None,
            **facts,
        )
        rate = format_rate((facts["final"] or {}).get("correct_rate"))
        self.screen.say(f"{run.name}: {status} at step {facts['step']} in {format_seconds(seconds)}, correct {rate}")
        if status == "finished":
            self.squeeze.begin(run)
            self._look()
        if status == "failed":
            self.screen.say(f"  {ended.error or f'exit code {ended.exit_code}'}\n  All it wrote: {run.folder}")

    def _look(self) -> None:
        """Leave out what a sequential test has made needless."""
        if self.early_look is None:
            return
        for sentence in self.early_look.look():
            self.screen.say(sentence)
        needless = [run for run in self.pending if self.early_look.is_settled(run.condition)]
        self.pending = [run for run in self.pending if run not in needless]
        self.early_look.table["skipped"] = sorted({*self.early_look.table["skipped"], *(run.name for run in needless)})
        for run in needless:
            self.manifest.note(run.name, status="skipped")

    def _stop(self, told: list[int]) -> None:
        """Runs save and end; those that take too long, or a second signal, end at once."""
        self.screen.say("Stopping: every run saves a checkpoint. Once more stops at once.")
        self.executor.stop()
        deadline = time.monotonic() + GRACE_S
        while self.running:
            for ended in self.executor.poll():
                self._note_end(ended, stopped=True)
            if time.monotonic() > deadline or len(told) > 1:
                self.executor.kill()
            time.sleep(POLL_S)

    def _show(self, force: bool = False) -> None:
        if not self.screen.is_due() and not force:
            return
        progress = self._progress()
        # Runs that share a model take their steps in turn.
        left = seconds_left(list(progress.values()), 1 if self.settings.share_model else self.slots)
        self.screen.show(progress, left)

    def _progress(self) -> dict[str, RunProgress]:
        """How each run stands; the campaign knows the status better than the folder."""
        shown = {}
        for name, run in self.runs.items():
            status = self.manifest[name]["status"]
            progress = read_progress(run.folder) if status != "pending" else RunProgress("pending")
            shown[name] = replace(
                progress,
                status=status,
                max_steps=run.max_steps,
                elapsed_seconds=self._elapsed(name),
                attempts=self.manifest[name]["attempts"],
            )
        return taking_turns(shown) if self.settings.share_model else shown

    def _elapsed(self, name: str) -> float:
        """Seconds that a run has taken, this time and before."""
        current = time.monotonic() - self.running[name] if name in self.running else 0.0
        return float(self.manifest[name]["seconds"]) + current

    def _conclude(self, stopped: bool) -> int:
        statuses = [self.manifest[name]["status"] for name in self.runs]
        bad = [name for name in self.runs if self.manifest[name]["status"] == "failed"]
        whole = all(status in ("finished", "skipped") for status in statuses)
        self.manifest.end("interrupted" if stopped else "finished" if whole else "failed")
        self._show(force=True)
        folder = self.manifest.folder
        if not stopped:
            self.squeeze.collect(self.screen.say, wait=True)
            for line in (*summarise(self.manifest), *stopped_early(self.manifest.table)):
                self.screen.say(line)
        if whole:
            self.screen.say(f"Done: {len(statuses)} runs in {folder}.")
            return 0
        if bad:
            self.screen.say(f"{len(bad)} of {len(statuses)} runs failed: {', '.join(bad)}.")
        self.screen.say(f"To go on: retrain --resume {folder}")
        return INTERRUPTED if stopped else 1


def final_numbers(folder: Path) -> dict[str, Any]:
    """What a run came to: its step, the metrics of its last step, its last evaluation."""
    steps, evaluations = read_tail(folder / METRICS), read_tail(folder / EVALS)
    progress = read_progress(folder)
    last = evaluations[-1] if evaluations else None
    return {
        "step": progress.step,
        "final": steps[-1] if steps else None,
        "evaluation": {key: value for key, value in last.items() if key not in ("correct", "counted")}
        if last
        else None,
    }


def choose_folder(config: TrainConfig) -> Path:
    """The folder that is resumed, the log_dir that was asked for, or a new one with the date in its name."""
    log_dir = Path(config.logging.log_dir).expanduser().absolute()
    asked = config.logging.log_dir != options_by_path()["logging.log_dir"].default
    if config.resume.from_:
        resumed = Path(config.resume.from_).expanduser().absolute()
        if not (resumed / MANIFEST).is_file():
            raise CheckpointError(f"{resumed} has no {MANIFEST}, so there is no campaign to go on with.")
        if asked and log_dir != resumed:
            raise ConfigError(f"[logging] log_dir = {str(log_dir)!r} is not the campaign to go on with, {resumed}.")
        return resumed
    if asked:
        return log_dir
    name = datetime.now().strftime("campaign_%Y%m%d_%H%M%S")
    candidates = (log_dir.parent / f"{name}{suffix}" for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def build_executor(config: TrainConfig, folder: Path, runs: Sequence[Run], say: Callable[[str], None]) -> Executor:
    """Where the runs execute."""
    assert config.campaign is not None
    if config.campaign.executor == "ray":
        from retrain.campaign.ray import RayCluster  # noqa: PLC0415  (an optional extra)

        return RayCluster(config.campaign.gpus_per_run, say)
    if config.campaign.share_model:
        refuse_unshared(runs)
        return SharedModelProcess(folder)
    return LocalProcesses()


def _refuse_other_campaign(earlier: Manifest, runs: Sequence[Run]) -> None:
    """A campaign goes on with the same code and settings, or its runs cannot be compared."""
    if earlier.version != version():
        raise CheckpointError(
            f"{earlier.folder} was run by retrain {earlier.version}, and this is {version()}: their runs may not be "
            "comparable.  Try: that version, a new campaign, or insist with --force-resume"
        )
    for run in runs:
        stored = run.folder / CONFIG_FILE
        if not stored.is_file():
            continue
        differences = meaningful_differences(load_config(stored), with_absolute_paths(run.config))
        if differences:
            raise CheckpointError(
                f"{run.folder} was trained with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nTry: leave them as they were, start a new campaign, or insist with --force-resume"
            )


def _without_resume(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"resume": type(config.resume)()})


@contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """A list that signals are added to, instead of breaking into whatever is under way."""
    told: list[int] = []
    # Whoever started it with nohup wants it to outlive the terminal.
    wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, frame: told.append(number)) for number in wanted}
    try:
        yield told
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
