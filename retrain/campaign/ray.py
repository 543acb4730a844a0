"""Runs on the machines of a Ray cluster.

Each run is an actor that reserves its GPUs, starts the same process as on one machine, and hands over what its folder
gained. So the local folder follows the run, checkpoints included; when a machine is lost, the run goes on from there on
another one.
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
from retrain.campaign.processes import STDERR, Ended, RunProcess, has_checkpoint, prepare_folder, read_error
from retrain.config import dump_config, load_config
from retrain.errors import ConfigError, MissingExtraError
from retrain.storage.folder import CONFIG_FILE, LOCK_FILE

try:
    import ray
except ImportError as error:
    raise MissingExtraError(
        '[campaign] executor = "ray" needs the package ray, which is not installed.  Try: pip install -e ".[ray]"'
    ) from error

# Machines that a run may lose before it counts as failed.
MAX_LOSSES = 3
POLL_S = 1.0
# These are the machine's own: where a folder lies, and who holds it.
_NOT_COPIED = (CONFIG_FILE, LOCK_FILE)


@dataclass(frozen=True)
class Piece:
    """Bytes that a file of the run's folder has at an offset; what was there after it is gone."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Update:
    """What changed in a run's folder since the last one."""

    pieces: list[Piece]
    present: list[str]
    """Every file that there is; others were deleted."""
    exit_code: int | None


class RemoteRun:
    """The actor: one run on whatever machine Ray chose."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="retrain_run_"))
        apply_update(self.folder, Update(pieces, [piece.path for piece in pieces], None))
        places = {"logging.log_dir": str(self.folder), "backend.adapter_path": str(self.folder / "adapter")}
        config = load_config(self.folder / CONFIG_FILE, places)
        (self.folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        self.sent = {path: _state_of(self.folder / path) for path in list_files(self.folder)}
        self.process = RunProcess(self.folder)

    def poll(self) -> Update:
        """What is new. The exit code is looked at first, so that the last update has everything."""
        exit_code = self.process.exit_code()
        present = list_files(self.folder)
        pieces = [piece for path in present if (piece := self._read(path)) is not None]
        return Update(pieces, present, exit_code)

    def _read(self, path: str) -> Piece | None:
        """What a file gained; all of it, unless it is a log that only grew."""
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
            # A checkpoint that was dropped just now.
            return None
        self.sent[path] = state
        return Piece(path, offset, data)

    def signal(self, number: int) -> None:
        """Pass a signal on to the run."""
        self.process.signal(number)

    def clean(self) -> None:
        """Delete the folder; all of it has been handed over."""
        self.process.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _Flight:
    """A run on its way."""

    run: Run
    actor: Any
    update: Any
    asked_at: float = field(default_factory=time.monotonic)
    losses: int = 0
    begun: bool = False
    """Whether it has a machine."""


class RayCluster:
    """An Executor on the cluster that `RAY_ADDRESS` names or that this machine belongs to, or else on this machine."""

    def __init__(self, gpus_per_run: float, say: Callable[[str], None]) -> None:
        self.gpus = gpus_per_run
        self.say = say
        self.flights: dict[str, _Flight] = {}
        self.stopping = False
        ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        there = ray.cluster_resources().get("GPU", 0.0)
        if there < gpus_per_run:
            ray.shutdown()
            raise ConfigError(
                f"[campaign] gpus_per_run = {gpus_per_run:g}, but the Ray cluster has {there:g} GPUs in all.  "
                "Try: gpus_per_run = 0 for runs on the CPU"
            )

    def start(self, run: Run) -> None:
        """Ask Ray for a machine; the run begins when one has room."""
        prepare_folder(run)
        self._send(run, losses=0)

    def _send(self, run: Run, losses: int) -> None:
        make = ray.remote(RemoteRun).options(num_cpus=1, num_gpus=self.gpus, max_restarts=0)
        # A run that goes on takes its logs and checkpoints along.
        paths = list_files(run.folder) if has_checkpoint(run.folder) else []
        pieces = [Piece(path, 0, (run.folder / path).read_bytes()) for path in [*paths, CONFIG_FILE]]
        actor = make.remote(pieces)
        self.flights[run.name] = _Flight(run, actor, actor.poll.remote(), losses=losses)

    def poll(self) -> list[Ended]:
        """Take over what the runs' folders gained."""
        ended: list[Ended] = []
        for flight in list(self.flights.values()):
            if flight.update is None:
                if time.monotonic() - flight.asked_at >= POLL_S:
                    flight.update, flight.asked_at = flight.actor.poll.remote(), time.monotonic()
                continue
            ready, _ = ray.wait([flight.update], timeout=0)
            if ready:
                ended += self._take(flight)
        return ended

    def _take(self, flight: _Flight) -> Iterator[Ended]:
        name, folder = flight.run.name, flight.run.folder
        try:
            update: Update = ray.get(flight.update)
        except ray.exceptions.RayTaskError as error:
            del self.flights[name]
            yield Ended(name, 1, str(error.cause))
            return
        except ray.exceptions.RayError as error:
            yield from self._send_again(flight, str(error))
            return
        flight.update, flight.begun = None, True
        apply_update(folder, update)
        if update.exit_code is not None:
            del self.flights[name]
            flight.actor.clean.remote()
            yield Ended(name, update.exit_code, read_error(folder / STDERR))

    def _send_again(self, flight: _Flight, error: str) -> Iterator[Ended]:
        """The machine or its worker is gone: another one goes on with the last checkpoint that came over."""
        run, losses = flight.run, flight.losses + 1
        del self.flights[run.name]
        if self.stopping:
            yield Ended(run.name, -signal.SIGKILL)
            return
        if losses > MAX_LOSSES:
            yield Ended(run.name, 1, f"lost its machine {losses} times; the last time: {error}")
            return
        self.say(f"{run.name}: lost its machine; it goes on elsewhere")
        prepare_folder(run)
        self._send(run, losses)

    def stop(self) -> None:
        """As Ctrl-C would; runs that have no machine yet are called off."""
        self.stopping = True
        for flight in self.flights.values():
            if flight.begun:
                flight.actor.signal.remote(signal.SIGTERM)
            else:
                ray.kill(flight.actor)

    def kill(self) -> None:
        """End the runs, and then their actors."""
        self.stopping = True
        calls = [flight.actor.signal.remote(signal.SIGKILL) for flight in self.flights.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=1)
        for flight in self.flights.values():
            ray.kill(flight.actor)

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()


def list_files(folder: Path) -> list[str]:
    """The files of a run that are worth having elsewhere, by their path inside its folder; drafts are not."""
    inside = (
        path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
    )
    return [str(path) for path in inside if str(path) not in _NOT_COPIED and not any(p[0] == "." for p in path.parts)]


def apply_update(folder: Path, update: Update) -> None:
    """Make a folder what the other one was."""
    for piece in update.pieces:
        path = folder / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(piece.offset)
            file.write(piece.data)
            file.truncate()
    for name in set(list_files(folder)) - set(update.present):
        (folder / name).unlink()
    for place in sorted((path for path in (folder / "checkpoints").glob("step_*")), reverse=True):
        # A checkpoint that was dropped over there leaves empty folders here.
        if not any(path.is_file() for path in place.rglob("*")):
            shutil.rmtree(place)


def _state_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
