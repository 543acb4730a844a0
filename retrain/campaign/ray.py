"""Runs on the machines of a Ray cluster.

Each run is an actor that reserves its GPUs, starts the same process as a local run, and sends changes of its folder.
The local folder thus mirrors the run, checkpoints included; when a machine is lost, the run resumes on another one.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.campaign.plan import Run
from retrain.campaign.processes import RunExit, RunProcess, has_checkpoint, prepare_folder, read_error
from retrain.config import dump_config, load_config
from retrain.errors import ConfigError
from retrain.runtime.packages import missing
from retrain.storage.aside import CONFIG_FILE, LOCK_FILE
from retrain.storage.logs import STDERR

try:
    import ray
except ImportError as error:
    raise missing("ray", '[campaign] executor = "ray"') from error

# How many times a run may lose its machine before it counts as failed.
MAX_LOSSES = 3
POLL_S = 1.0
# Specific to a machine: paths, and the lock.
_NOT_COPIED = (CONFIG_FILE, LOCK_FILE)


@dataclass(frozen=True)
class FileChunk:
    """Bytes of a file from an offset to its end."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Update:
    """Changes of a run's folder since the previous update."""

    chunks: list[FileChunk]
    present: list[str]
    """All existing files; others were deleted."""
    exit_code: int | None


class RemoteRun:
    """The actor: one run on the machine that Ray chose."""

    def __init__(self, chunks: list[FileChunk]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="retrain_run_"))
        apply_update(self.folder, Update(chunks, [chunk.path for chunk in chunks], None))
        places = {"logging.log_dir": str(self.folder), "backend.adapter_path": str(self.folder / "adapter")}
        config = load_config(self.folder / CONFIG_FILE, places)
        (self.folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        self.sent = {path: _state_of(self.folder / path) for path in list_files(self.folder)}
        self.process = RunProcess(self.folder)

    def poll(self) -> Update:
        """Changes since the last call. The exit code is read first, so that the last update is complete."""
        exit_code = self.process.exit_code()
        present = list_files(self.folder)
        chunks = [chunk for path in present if (chunk := self._read(path)) is not None]
        return Update(chunks, present, exit_code)

    def _read(self, path: str) -> FileChunk | None:
        """The changed part of a file: what was appended to a log, else all of it."""
        try:
            state = _state_of(self.folder / path)
            before = self.sent.get(path)
            if state == before:
                return None
            grew = path.endswith((".jsonl", ".log")) and before is not None and state[0] > before[0]
            offset = before[0] if grew and before is not None else 0
            with (self.folder / path).open("rb") as file:
                file.seek(offset)
                data = file.read(state[0] - offset)
        except FileNotFoundError:
            # A checkpoint that was just deleted.
            return None
        self.sent[path] = state
        return FileChunk(path, offset, data)

    def signal(self, number: int) -> None:
        """Forward a signal to the run."""
        self.process.signal(number)

    def clean(self) -> None:
        """Delete the folder after the last update."""
        self.process.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _Job:
    run: Run
    actor: Any
    update: Any
    polled_at: float = field(default_factory=time.monotonic)
    losses: int = 0
    placed: bool = False
    """Whether it runs on a machine."""


class RayCluster:
    """An Executor on the cluster of `RAY_ADDRESS` or of this machine, or else on this machine alone."""

    def __init__(self, gpus_per_run: float, log: Callable[[str], None]) -> None:
        self.gpus = gpus_per_run
        self.log = log
        self.jobs: dict[str, _Job] = {}
        self.stopping = False
        ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        there = ray.cluster_resources().get("GPU", 0.0)
        if there < gpus_per_run:
            ray.shutdown()
            raise ConfigError(
                f"[campaign] gpus_per_run = {gpus_per_run:g}, but the Ray cluster has {there:g} GPUs in total.  "
                "Try: gpus_per_run = 0 for runs on the CPU"
            )

    def start(self, run: Run) -> None:
        """Submit a run; it starts when a machine has capacity."""
        prepare_folder(run)
        self._send(run, losses=0)

    def _send(self, run: Run, losses: int) -> None:
        make = ray.remote(RemoteRun).options(num_cpus=1, num_gpus=self.gpus, max_restarts=0)
        # A resumed run needs its logs and checkpoints.
        paths = list_files(run.folder) if has_checkpoint(run.folder) else []
        chunks = [FileChunk(path, 0, (run.folder / path).read_bytes()) for path in [*paths, CONFIG_FILE]]
        actor = make.remote(chunks)
        self.jobs[run.name] = _Job(run, actor, actor.poll.remote(), losses=losses)

    def poll(self) -> list[RunExit]:
        """Apply updates of the runs' folders."""
        ended: list[RunExit] = []
        for job in list(self.jobs.values()):
            if job.update is None:
                if time.monotonic() - job.polled_at >= POLL_S:
                    job.update, job.polled_at = job.actor.poll.remote(), time.monotonic()
                continue
            ready, _ = ray.wait([job.update], timeout=0)
            if ready:
                ended += self._take(job)
        return ended

    def _take(self, job: _Job) -> Iterator[RunExit]:
        name, folder = job.run.name, job.run.folder
        try:
            update: Update = ray.get(job.update)
        except ray.exceptions.RayTaskError as error:
            del self.jobs[name]
            yield RunExit(name, 1, str(error.cause))
            return
        except ray.exceptions.RayError as error:
            yield from self._send_again(job, str(error))
            return
        job.update, job.placed = None, True
        apply_update(folder, update)
        if update.exit_code is not None:
            del self.jobs[name]
            job.actor.clean.remote()
            yield RunExit(name, update.exit_code, read_error(folder / STDERR))

    def _send_again(self, job: _Job, error: str) -> Iterator[RunExit]:
        """Resume a run from its last received checkpoint after its machine was lost."""
        run, losses = job.run, job.losses + 1
        del self.jobs[run.name]
        if self.stopping:
            yield RunExit(run.name, -signal.SIGKILL)
            return
        if losses > MAX_LOSSES:
            yield RunExit(run.name, 1, f"lost its machine {losses} times; the last time: {error}")
            return
        self.log(f"{run.name}: lost its machine; resuming on another")
        prepare_folder(run)
        self._send(run, losses)

    def stop(self) -> None:
        """Send SIGTERM to the runs; those without a machine are cancelled."""
        self.stopping = True
        for job in self.jobs.values():
            if job.placed:
                job.actor.signal.remote(signal.SIGTERM)
            else:
                ray.kill(job.actor)

    def kill(self) -> None:
        """Kill the runs, then their actors."""
        self.stopping = True
        calls = [job.actor.signal.remote(signal.SIGKILL) for job in self.jobs.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=1)
        for job in self.jobs.values():
            ray.kill(job.actor)

    def close(self) -> None:
        """Disconnect from the cluster."""
        ray.shutdown()


def list_files(folder: Path) -> list[str]:
    """The files of a run to copy, relative to its folder; temporary files are skipped."""
    inside = (
        path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
    )
    return [str(path) for path in inside if str(path) not in _NOT_COPIED and not any(p[0] == "." for p in path.parts)]


def apply_update(folder: Path, update: Update) -> None:
    """Apply an update to a folder."""
    for chunk in update.chunks:
        path = folder / chunk.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(chunk.offset)
            file.write(chunk.data)
            file.truncate()
    for name in set(list_files(folder)) - set(update.present):
        (folder / name).unlink()
    for place in sorted((path for path in (folder / "checkpoints").glob("step_*")), reverse=True):
        # A checkpoint that was deleted remotely leaves empty folders here.
        if not any(path.is_file() for path in place.rglob("*")):
            shutil.rmtree(place)


def _state_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
