"""The process of runs that share one model: threads that step in turn.

It reads the folder of a run from each line of its input, and answers with a line for each run that ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from retrain.assemble import Supplied
from retrain.backends.local.shared import SharedModel
from retrain.campaign.processes import STDERR, STDOUT
from retrain.config import load_config
from retrain.errors import RetrainError
from retrain.runtime.child import end_with_parent
from retrain.storage.folder import CONFIG_FILE
from retrain.tracking.console import Console
from retrain.trainer import train
from retrain.types import Group, StepMetrics


class Turns:
    """Threads go one at a time, in the order in which they queued."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.changed = threading.Condition()
        self.stopping = False

    def take(self) -> None:
        """Wait for a turn."""
        own = threading.get_ident()
        with self.changed:
            self.waiting.append(own)
            self.changed.wait_for(lambda: self.waiting[0] == own)

    def leave(self) -> None:
        """Let the next one go."""
        with self.changed:
            self.waiting.popleft()
            self.changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A turn."""
        self.take()
        try:
            yield
        finally:
            self.leave()


class TurnConsole(Console):
    """A run's console: once a step is logged the others have their turns, and when told to, the run stops."""

    def __init__(self, stream: TextIO, turns: Turns) -> None:
        super().__init__(stream)
        self.turns = turns

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Print the step, then wait until the other runs have taken theirs."""
        super().log(step, metrics, groups)
        self.turns.leave()
        self.turns.take()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show progress. Up to its training a step can be given up, and is when the campaign stops."""
        if self.turns.stopping and phase != "training":
            raise KeyboardInterrupt
        super().progress(phase, done, total)


class Host:
    """The process's side: a thread a run, one model for all."""

    def __init__(self, answers: TextIO) -> None:
        self.turns = Turns()
        self.model = SharedModel()
        self.answers = answers
        self.threads: list[threading.Thread] = []

    def start(self, folder: Path) -> None:
        """Begin a run in a thread of its own."""
        thread = threading.Thread(target=self._run, args=(folder,), name=folder.name)
        self.threads.append(thread)
        thread.start()

    def _run(self, folder: Path) -> None:
        with self.turns.held():
            code = self._train(folder)
            self.answers.write(json.dumps({"name": folder.name, "exit_code": code}) + "\n")
            self.answers.flush()

    def _train(self, folder: Path) -> int:
        with (folder / STDOUT).open("a") as output, (folder / STDERR).open("a") as errors:
            try:
                resume = {"resume.from": str(folder)} if (folder / "checkpoints").is_dir() else {}
                config = load_config(folder / CONFIG_FILE, resume)
                train(config, console=TurnConsole(output, self.turns), supplied=Supplied(backend=self.model.build))
            except KeyboardInterrupt:
                return 130
            except RetrainError as error:
                print(f"error: {error}", file=errors)
                return error.exit_code
            except Exception:
                traceback.print_exc(file=errors)
                return 1
            return 0

    def stop(self, *signal_and_frame: object) -> None:
        """Every run saves and ends when its turn comes."""
        self.turns.stopping = True


def main() -> None:
    """Read run folders until there are no more, and run each of them to its end."""
    end_with_parent()
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host = Host(answers)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, host.stop)
    for line in sys.stdin:
        host.start(Path(line.strip()))
    for thread in host.threads:
        thread.join()
