"""Runs as processes of this machine, each with its own output files, so that a crash of one is its own affair."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from retrain.campaign.plan import Run
from retrain.config import dump_config
from retrain.errors import CheckpointError
from retrain.runtime.child import CHILD, PARENT
from retrain.storage.checkpoint import Checkpoints
from retrain.storage.folder import CONFIG_FILE, RUN_FILES, with_absolute_paths

STDOUT, STDERR = "stdout.log", "stderr.log"
_ERROR_LINES = 3
_ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class Ended:
    """A run whose process is gone; `error` is the end of what it complained about."""

    name: str
    exit_code: int
    error: str = ""


class Executor(Protocol):
    """Where runs execute. Nothing here waits; `poll` is called several times a second."""

    def start(self, run: Run) -> None:
        """Begin a run, or go on with it where its folder has a checkpoint."""
        ...

    def poll(self) -> list[Ended]:
        """The runs that ended since the last call."""
        ...

    def stop(self) -> None:
        """Ask every run to save and end."""
        ...

    def kill(self) -> None:
        """End every run at once; what was saved stays."""
        ...

    def close(self) -> None:
        """Give back what the executor itself holds; no run is left."""
        ...


class LocalProcesses:
    """One process a run."""

    def __init__(self) -> None:
        self.running: dict[str, RunProcess] = {}

    def start(self, run: Run) -> None:
        """Start its process."""
        prepare_folder(run)
        self.running[run.name] = RunProcess(run.folder)

    def poll(self) -> list[Ended]:
        """Collect the processes that are gone."""
        gone = {name: process for name, process in self.running.items() if process.exit_code() is not None}
        for name, process in gone.items():
            del self.running[name]
            process.close()
        return [
            Ended(name, process.exit_code() or 0, read_error(process.folder / STDERR)) for name, process in gone.items()
        ]

    def stop(self) -> None:
        """As Ctrl-C would."""
        for process in self.running.values():
            process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """And all they started."""
        for process in self.running.values():
            process.signal(signal.SIGKILL)

    def close(self) -> None:
        """Processes are all there is."""


class RunProcess:
    """`retrain config.toml` in a prepared run folder, in a session of its own, so that Ctrl-C reaches only us."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        resume = ["--resume", str(folder)] if (folder / "checkpoints").is_dir() else []
        self.files: list[IO[bytes]] = [(folder / name).open("ab") for name in (STDOUT, STDERR)]
        self.process = subprocess.Popen(
            [sys.executable, *CHILD, str(folder / CONFIG_FILE), *resume],
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            env=os.environ | {PARENT: str(os.getpid())},
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the run; SIGKILL to everything that it started as well."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def close(self) -> None:
        """Close the output files."""
        for file in self.files:
            file.close()


def prepare_folder(run: Run) -> None:
    """Write the run's configuration; clear what a run left that was cut before its first checkpoint.

    Nothing is lost by that: the run begins again with the same seed and writes the same steps.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    if not has_checkpoint(run.folder):
        for name in RUN_FILES:
            path = run.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # The paths of a campaign file are relative to where it was started.
    (run.folder / CONFIG_FILE).write_text(dump_config(with_absolute_paths(run.config)), encoding="utf-8")


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a whole checkpoint to go on from."""
    try:
        Checkpoints(folder, 1, lambda line: None).newest()
    except CheckpointError:
        return False
    return True


def read_error(path: Path) -> str:
    """The last lines of a file of errors."""
    try:
        text = path.read_bytes()[-_ERROR_CHARACTERS:].decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-_ERROR_LINES:])
