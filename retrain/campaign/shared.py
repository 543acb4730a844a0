"""Runs that share one model: the executor that starts their process. `host.py` runs inside it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

from retrain.campaign.plan import Run
from retrain.campaign.processes import RunExit, mark_attempt, prepare_folder, read_error
from retrain.runtime.child import PARENT, python_command
from retrain.storage.logs import SHARED_LOG, STDERR


class SharedModelProcess:
    """An Executor with one process for all runs, started with the first run and restarted if it dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.running: dict[str, Run] = {}
        self.results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.listener: threading.Thread | None = None

    def start(self, run: Run) -> None:
        """Add a run to the process."""
        prepare_folder(run)
        mark_attempt(run.folder / STDERR)
        if self.process is None or self.process.poll() is not None:
            self._start_process()
        self.running[run.name] = run
        assert self.process is not None and self.process.stdin is not None
        # `poll` detects a process that has just died.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{run.folder}\n")
            self.process.stdin.flush()

    def _start_process(self) -> None:
        self.close()
        mark_attempt(self.folder / SHARED_LOG)
        with (self.folder / SHARED_LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [*python_command(), "-c", "from retrain.campaign.host import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                errors="surrogateescape",
                env=os.environ | {PARENT: str(os.getpid())},
                start_new_session=True,
            )
        self.listener = threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True)
        self.listener.start()

    def _listen(self, results: IO[str]) -> None:
        with results:
            for line in results:
                self.results.put(line)

    def poll(self) -> list[RunExit]:
        """Runs that reported their end, or all of them when the process died."""
        died = self.process is not None and self.process.poll() is not None
        if died and self.listener is not None:
            self.listener.join()
        ended = []
        while not self.results.empty():
            result = json.loads(self.results.get())
            run = self.running.pop(result["name"])
            ended.append(RunExit(run.name, result["exit_code"], read_error(run.folder / STDERR)))
        if died and self.process is not None:
            code, text = self.process.returncode, read_error(self.folder / SHARED_LOG)
            ended += [RunExit(name, code or 1, text or "the shared process died") for name in self.running]
            self.running.clear()
        return ended

    def stop(self) -> None:
        """Send SIGTERM: every run saves a checkpoint and ends."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number) if number == signal.SIGKILL else self.process.send_signal(number)

    def close(self) -> None:
        """Close the input, upon which the process ends."""
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
