"""Starts the ranks of a run on this machine, shows rank 0's output, and ends all ranks when one fails."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click

from retrain.isolation.redaction import redact
from retrain.runtime.child import CHILD, PARENT, python_command
from retrain.runtime.clock import awake_s
from retrain.runtime.interrupts import INTERRUPTED, SIGNALS
from retrain.storage.logs import RANK_LOGS
from retrain.storage.publishing import make_temporary

# When a rank fails, rank 0 reports it and ends; if it does not, it is sent SIGTERM, then all ranks are killed.
TERMINATE_AFTER_S, KILL_AFTER_S = 20.0, 45.0
# Ranks have nothing to save when rank 0 has failed; those that wait for its first command never learn of it.
_PATIENCE_AFTER_FAILURE_S = 2.0
_POLL_S = 0.1
_LAST_CHARACTERS = 6000


class Ranks:
    """The processes of one run. Each has its own process group, so that only the launcher receives Ctrl-C."""

    def __init__(self, processes: int, command: Sequence[str], logs: Path) -> None:
        self.command = command
        self.logs = logs
        self.is_interrupted = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = os.environ | {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            PARENT: str(os.getpid()),
        }
        threads = max(1, (os.cpu_count() or 1) // processes)
        shared.setdefault("OMP_NUM_THREADS", str(threads))
        self.processes = [
            self._start(rank, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)
        ]

    def _start(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        if rank == 0:
            # No terminal: a background process group that reads from it would be stopped.
            return subprocess.Popen(self.command, env=environment, process_group=0, stdin=subprocess.DEVNULL)
        with self.log_of(rank).open("wb") as log:
            return subprocess.Popen(
                self.command, env=environment, process_group=0, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log_of(self, rank: int) -> Path:
        """Log file of a rank."""
        return self.logs / f"rank_{rank}.log"

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to rank 0, which saves and then stops the other ranks."""
        self.is_interrupted = True
        self._send_to_main(number)

    def _send_to_main(self, number: int) -> None:
        if self.processes[0].poll() is None:
            self.processes[0].send_signal(number)

    def watch(self) -> int:
        """Wait until the run ends; returns its exit code."""
        failed, since, terminated = 0, 0.0, False
        while (code := self.processes[0].poll()) is None:
            if not since:
                # Ranks exit with 0 only when the run is over.
                gone = [rank for rank, process in enumerate(self.processes) if rank and process.poll()]
                failed, since = (gone[0], awake_s()) if gone else (0, 0.0)
            elif awake_s() - since > KILL_AFTER_S:
                break
            elif awake_s() - since > TERMINATE_AFTER_S and not terminated:
                terminated = True
                self._show(failed)
                self._send_to_main(signal.SIGTERM)
            time.sleep(_POLL_S)
        if code is not None and -code in SIGNALS and self.is_interrupted:
            # Before rank 0 handles signals, they end it.
            click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        elif code is not None and code < 0 and not terminated:
            click.echo(f"error: rank 0 was ended by {signal.Signals(-code).name}.", err=True)
        self.end(0.0 if code is None else _PATIENCE_AFTER_FAILURE_S if code else TERMINATE_AFTER_S)
        return code if code is not None and code >= 0 and not terminated else 1

    def _show(self, rank: int) -> None:
        output = redact(self.log_of(rank).read_text(errors="replace"))[-_LAST_CHARACTERS:].strip()
        code = self.processes[rank].returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        click.echo(f"\nRank {rank} {how}. Its last output:\n{output or '(nothing)'}\n", err=True)

    def end(self, patience_s: float) -> None:
        """Wait for the remaining processes to end, then kill them."""
        until = awake_s() + patience_s
        while any(process.poll() is None for process in self.processes) and awake_s() < until:
            time.sleep(_POLL_S)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def launch(processes: int, arguments: Sequence[str], log_dir: Path) -> int:
    """Run `retrain` with these arguments in several processes; returns the exit code."""
    command = [*python_command(), *CHILD, *arguments]
    folder = make_temporary("retrain-ranks")
    try:
        ranks = Ranks(processes, command, folder)
        previous = {number: signal.signal(number, ranks.forward) for number in SIGNALS}
        try:
            code = ranks.watch()
        finally:
            ranks.end(patience_s=0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
        # Copied last: a starting run moves an earlier run in its folder away. One that is refused leaves it as it is.
        if log_dir.is_dir() and code != click.UsageError.exit_code:
            shutil.copytree(folder, log_dir / RANK_LOGS, dirs_exist_ok=True)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
