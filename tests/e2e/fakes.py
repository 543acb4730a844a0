"""Parts that a run is given by dotted path: a backend whose answers a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from retrain.backends import Capabilities
from retrain.config import TrainConfig
from retrain.testing import FakeBackend, Script, ScriptedEngine
from retrain.types import Completion, Datum, IntArray, Sampling, StepMetrics


def answer_at_random(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
    """Right in about half of all cases."""
    return f"the answer is {'right' if rng.random() < 0.5 else 'wrong'}"


class Play:
    """What the fake backend does; a test sets it, and reads what was done."""

    script: Script = staticmethod(answer_at_random)
    before_generate: Callable[[int], None] = staticmethod(lambda call: None)
    before_train: Callable[[int], None] = staticmethod(lambda step: None)
    outcome: ClassVar[StepMetrics] = {}
    context_length: int = 4096
    gives_entropies: bool = True
    calls: int = 0
    trained: ClassVar[list[list[Datum]]] = []
    prompts: ClassVar[list[list[IntArray]]] = []


class WatchedEngine(ScriptedEngine):
    """Counts its calls."""

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        Play.calls += 1
        Play.prompts.append(list(prompts))
        Play.before_generate(Play.calls)
        return super().generate(prompts, sampling)


class PlayedBackend(FakeBackend):
    """A FakeBackend that a test can disturb."""

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        Play.before_train(step)
        Play.trained.append(list(datums))
        return super().train_step(datums, step) | Play.outcome


class LateBackend(PlayedBackend):
    """Tells of a step when the next one is trained on: its number as loss and learning rate, every odd one skipped."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.capabilities = Capabilities(Play.context_length, True, reports_late=True)
        self.reported: StepMetrics = {"loss": 0.0}

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        super().train_step(datums, step)
        own = {"loss": float(step), "lr": float(step), "skipped": step % 2} | Play.outcome
        before, self.reported = self.reported, own
        return before | {"staleness": min(step, 1)}

    def save(self, path: Path) -> None:
        super().save(path)
        (path / "reported.json").write_text(json.dumps(self.reported))

    def load(self, path: Path) -> None:
        super().load(path)
        self.reported = json.loads((path / "reported.json").read_text())


class SettlingBackend(LateBackend):
    """The same, which can be asked to wait."""

    def settle(self) -> StepMetrics:
        return self.reported


def build_late(config: TrainConfig, tokenizer: Any, log: Any, progress: Any) -> LateBackend:
    """A backend that reports late and cannot be waited for."""
    return LateBackend(WatchedEngine(lambda *a: Play.script(*a)))


def build_settling(config: TrainConfig, tokenizer: Any, log: Any, progress: Any) -> LateBackend:
    """A backend that reports late, as those of this package do."""
    return SettlingBackend(WatchedEngine(lambda *a: Play.script(*a)))


def build(config: TrainConfig, tokenizer: Any, log: Any, progress: Any) -> PlayedBackend:
    """What `[backend] backend = "e2e.fakes.build"` makes."""
    backend = PlayedBackend(WatchedEngine(lambda *a: Play.script(*a)))
    backend.capabilities = Capabilities(Play.context_length, Play.gives_entropies)
    log("LocalTrainHelper ready (engine=scripted, split_mode=False).")
    return backend
