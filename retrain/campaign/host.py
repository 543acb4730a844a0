"""The process of runs that share one model: threads that step in turn.

Each line of its input is the folder of a run; it writes a line for each run that ended.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from retrain.assemble import Overrides
from retrain.backends.local.shared import SharedModel
from retrain.config import load_config
from retrain.errors import RetrainError
from retrain.isolation.redaction import redact
from retrain.runtime.child import end_with_parent
from retrain.runtime.interrupts import INTERRUPTED
from retrain.storage.aside import CONFIG_FILE
from retrain.storage.logs import STDERR, STDOUT
from retrain.tracking.console import Console
from retrain.trainer import train
from retrain.types import StepMetrics


class Turns:
    """Lets threads run one at a time, in the order in which they queued."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.changed = threading.Condition()
        self.stopping = False

    def take(self) -> None:
        """Wait for a turn."""
        thread = threading.get_ident()
        with self.changed:
            self.waiting.append(thread)
            self.changed.wait_for(lambda: self.waiting[0] == thread)

    def leave(self) -> None:
        """Pass the turn on."""
        with self.changed:
            self.waiting.popleft()
            self.changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and pass it on at the end."""
        self.take()
        try:
            yield
        finally:
            self.leave()


class TurnControl:
    """A RunControl: after each step the other runs have their turns; all stop when the campaign does."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def should_stop(self) -> bool:
        """Whether the campaign is stopping."""
        return self.turns.stopping

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """Wait until the other runs have taken a step."""
        self.turns.leave()
        self.turns.take()


class Host:
    """The process: one thread per run, one model for all."""

    def __init__(self, answers: TextIO) -> None:
        self.turns = Turns()
        self.model = SharedModel()
        self.answers = answers
        self.threads: list[threading.Thread] = []

    def start(self, folder: Path) -> None:
        """Start a run in its own thread."""
        thread = threading.Thread(target=self._run, args=(folder,), name=folder.name)
        self.threads.append(thread)
        thread.start()

    def _run(self, folder: Path) -> None:
        with self.turns.turn():
            code = 1
            try:
                code = self._train(folder)
            finally:
                # Even if the error could not be written: the campaign waits for every answer.
                self.answers.write(json.dumps({"name": folder.name, "exit_code": code}) + "\n")
                self.answers.flush()

    def _train(self, folder: Path) -> int:
        with _appending(folder / STDOUT) as output, _appending(folder / STDERR) as errors:
            try:
                resume = {"resume.from": str(folder)} if (folder / "checkpoints").is_dir() else {}
                config = load_config(folder / CONFIG_FILE, resume)
                overrides = Overrides(backend=self.model.build, control=TurnControl(self.turns))
                # The campaign has compared the settings, or was told not to.
                train(config, force_resume=True, console=Console(output), overrides=overrides)
            except KeyboardInterrupt:
                return INTERRUPTED
            except RetrainError as error:
                print(redact(f"error: {error}"), file=errors)
                return error.exit_code
            except Exception:
                print(redact(traceback.format_exc()), file=errors)
                return 1
            return 0

    def stop(self, *signal_and_frame: object) -> None:
        """Let every run save and end at its next turn."""
        self.turns.stopping = True


def _appending(path: Path) -> TextIO:
    # What foreign code raises may have any characters, in any locale.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def main() -> None:
    """Read run folders from standard input and run all of them."""
    end_with_parent()
    # Output of libraries must not be mistaken for a result.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host = Host(answers)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, host.stop)
    # PYTHONIOENCODING may say otherwise.
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as folders:
        for line in folders:
            host.start(Path(line.strip()))
    for thread in host.threads:
        thread.join()
