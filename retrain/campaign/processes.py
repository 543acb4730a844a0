"""Runs as separate local processes with their own output files, so that a crash does not affect other runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from retrain.campaign.plan import Run
from retrain.config import dump_config
from retrain.errors import CheckpointError
from retrain.isolation.redaction import redact
from retrain.runtime.child import CHILD, PARENT, python_command
from retrain.storage.aside import CONFIG_FILE, RUN_FILES
from retrain.storage.checkpoint import Checkpoints, replace_file
from retrain.storage.folder import with_absolute_paths
from retrain.storage.logs import STDERR, STDOUT

_ATTEMPT = "---- another attempt ----"
_ERROR_LINES = 3
_ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class RunExit:
    """A run whose process has exited; `error` is the tail of its stderr."""

    name: str
    exit_code: int
    error: str = ""


class Executor(Protocol):
    """Where runs execute. No method blocks; `poll` is called several times per second."""

    def start(self, run: Run) -> None:
        """Start a run, or resume it if its folder has a checkpoint."""

    def poll(self) -> list[RunExit]:
        """The runs that exited since the last call."""

    def stop(self) -> None:
        """Ask every run to save and end."""

    def kill(self) -> None:
        """Kill every run."""

    def close(self) -> None:
        """Release resources; no run is left."""


class LocalProcesses:
    """One process per run."""

    def __init__(self) -> None:
        self.running: dict[str, RunProcess] = {}

    def start(self, run: Run) -> None:
        """Start its process."""
        prepare_folder(run)
        self.running[run.name] = RunProcess(run.folder)

    def poll(self) -> list[RunExit]:
        """Collect the processes that have exited."""
        exited = {name: process for name, process in self.running.items() if process.exit_code() is not None}
        for name, process in exited.items():
            del self.running[name]
            process.close()
        return [
            RunExit(name, process.exit_code() or 0, read_error(process.folder / STDERR))
            for name, process in exited.items()
        ]

    def stop(self) -> None:
        """Send SIGTERM: every run saves a checkpoint and ends."""
        for process in self.running.values():
            process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the processes and their children."""
        for process in self.running.values():
            process.signal(signal.SIGKILL)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class RunProcess:
    """`retrain config.toml` in a prepared run folder, in its own session so that it does not receive Ctrl-C."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mark_attempt(folder / STDERR)
        # The campaign has compared the settings, or was told not to.
        resume = ["--resume", str(folder), "--force-resume"] if (folder / "checkpoints").is_dir() else []
        self.files: list[IO[bytes]] = [(folder / name).open("ab") for name in (STDOUT, STDERR)]
        self.process = subprocess.Popen(
            [*python_command(), *CHILD, str(folder / CONFIG_FILE), *resume],
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            env=os.environ | {PARENT: str(os.getpid())},
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """The exit code: None while it is running, negative for a signal."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the run; SIGKILL also to its children."""
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
    """Write the configuration of a run; remove what a run without a checkpoint left behind.

    Nothing is lost: it starts again with the same seed and writes the same steps.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    if not has_checkpoint(run.folder):
        for name in RUN_FILES:
            path = run.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # Paths in a campaign file are relative to the working directory.
    replace_file(run.folder / CONFIG_FILE, dump_config(with_absolute_paths(run.config)))


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a complete checkpoint to resume from."""
    try:
        Checkpoints(folder, 1, lambda line: None).newest()
    except CheckpointError:
        return False
    return True


def mark_attempt(path: Path) -> None:
    """Separate what will be appended to a log from earlier attempts."""
    if path.exists() and path.stat().st_size:
        with path.open("ab") as file:
            file.write(f"\n{_ATTEMPT}\n".encode())


def read_error(path: Path) -> str:
    """The last lines of stderr in the newest attempt."""
    try:
        # More than is shown: a secret at the cut is redacted as a whole.
        text = redact(path.read_bytes()[-16 * _ERROR_CHARACTERS :].decode("utf-8", "replace"))[-_ERROR_CHARACTERS:]
    except OSError:
        return ""
    newest = text.rpartition(_ATTEMPT)[2]
    return "\n".join([line for line in newest.splitlines() if line.strip()][-_ERROR_LINES:])
