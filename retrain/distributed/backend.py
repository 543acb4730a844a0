"""Rank 0's backend: it has the others sample and train along, and is one Backend to the program above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.backends import FrozenModel
from retrain.backends.local import LocalBackend
from retrain.backends.local.learner import Size
from retrain.backends.local.split import watched
from retrain.config import TrainConfig
from retrain.distributed.learner import RankedLearner
from retrain.distributed.links import Hub
from retrain.distributed.orders import Load, Sample, Save, Sync, Train
from retrain.distributed.shares import share_datums, share_prompts
from retrain.inference_engine import InferenceEngine, Progress
from retrain.runtime.interrupts import deferred
from retrain.types import Completion, Datum, IntArray, Sampling, StepMetrics


class RankedEngine:
    """Every rank samples a stretch of the prompts; what is drawn does not depend on how many ranks there are."""

    def __init__(self, own: InferenceEngine, hub: Hub) -> None:
        self.own = own
        self.hub = hub

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Draw completions of all prompts, in order."""
        parts = share_prompts(len(prompts), self.hub.place.world)
        asked = {
            rank: Sample(prompts[part], replace(sampling, first=sampling.first + part.start * sampling.n))
            for rank, part in enumerate(parts)
            if part.start < part.stop
        }
        own = asked.pop(0, None)
        self.hub.tell(asked)
        try:
            drawn = self.own.generate(own.prompts, own.sampling) if own is not None else []
            answers = self.hub.collect()
        except BaseException:
            self.hub.abandon()
            raise
        return [*drawn, *(group for rank in sorted(asked) for group in answers[rank])]

    def sync(self, weights: object) -> None:
        """The backend lets every rank do so before it lends this engine."""

    def shutdown(self) -> None:
        """Free this rank's engine; the others free their own as they end."""
        self.own.shutdown()


class RankedBackend:
    """A Backend over the ranks of a run; `on_all`: every one of them samples, not rank 0 alone."""

    def __init__(self, own: LocalBackend, hub: Hub, on_all: bool) -> None:
        self.own = own
        self.hub = hub
        assert isinstance(own.learner, RankedLearner)
        self.learner: RankedLearner = own.learner
        self.capabilities = own.capabilities
        self.engine: InferenceEngine = RankedEngine(own.engine, hub) if on_all else own.engine

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with the newest weights on every rank."""
        # A rank that left a collective half-way would leave the others waiting in it.
        with deferred():
            self.hub.tell_all(Sync(step))
            with self.hub.explained():
                self.own.sampler(step)
            self.hub.collect()
        return self.engine

    def frozen(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The student, on this rank alone."""
        return self.own.frozen(config, tokenizer, say, progress)

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimiser step: every rank computes the gradient of its share, and all take the step of their sum."""
        usable = [datum for datum in datums if datum.mask_T.any()]
        size = Size.of(usable)
        parts = share_datums(usable, self.hub.place.world)
        if self.learner.is_whole:
            # A pass of sharded ranks takes all of them, so there nobody looks at rows that are not trained on.
            parts[0] += [datum for datum in datums if datum.check_T is not None]
        self.hub.tell({rank: Train(part, size, step) for rank, part in enumerate(parts) if rank})
        with self.hub.explained():
            told = self.learner.take_step(parts[0], size, step)
        self.hub.collect()
        self.learner.refuse_disagreement()
        return told | {"staleness": 0} | watched(self.own.engine)

    def save(self, path: Path) -> None:
        """Write a checkpoint like that of a single process; where every rank holds a part, all of them give theirs."""
        if self.learner.is_whole:
            with self.hub.writing():
                self.own.save(path)
            return
        self.hub.tell_all(Save(path))
        with self.hub.explained():
            self.own.save(path)
        self.hub.collect()

    def load(self, path: Path) -> None:
        """Restore it on every rank."""
        self.hub.tell_all(Load(path))
        with self.hub.explained():
            self.own.load(path)
        self.hub.collect()

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Free this rank's engine; the others are told that the run is over by whoever holds the hub."""
        self.own.close(ended_by)
