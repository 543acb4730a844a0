"""Rank 0's backend: a single Backend to the training loop, which sends commands to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from retrain.backends import FrozenModel
from retrain.backends.local import LocalBackend
from retrain.backends.local.learner import StepSize
from retrain.backends.local.split import engine_metrics
from retrain.config import TrainConfig
from retrain.distributed.balance import balance_datums, split_prompts
from retrain.distributed.learner import RankedLearner
from retrain.distributed.links import Hub
from retrain.distributed.worker import Worker
from retrain.inference_engine import InferenceEngine, Progress
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.interrupts import deferred
from retrain.types import Completion, Datum, IntArray, Sampling, StepMetrics


class RankedEngine:
    """Each rank samples a slice of the prompts; completions do not depend on the number of ranks."""

    def __init__(self, local: InferenceEngine, hub: Hub) -> None:
        self.local = local
        self.hub = hub

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample completions for all prompts, in order."""
        parts = split_prompts(len(prompts), self.hub.rank_info.world)
        shares = {
            rank: (prompts[part], replace(sampling, first=sampling.first + part.start * sampling.n))
            for rank, part in enumerate(parts)
            if part.start < part.stop
        }
        first = shares.pop(0, None)
        self.hub.send({rank: partial(Worker.sample, prompts=p, sampling=s) for rank, (p, s) in shares.items()})
        try:
            drawn = self.local.generate(*first) if first is not None else []
            results = self.hub.collect()
        except BaseException:
            self.hub.abandon()
            raise
        return [*drawn, *(group for rank in sorted(shares) for group in results[rank])]

    def sync(self, weights: object) -> None:
        """Does nothing: the backend syncs every rank before it returns this engine."""

    def shutdown(self) -> None:
        """Shut down this rank's engine; the other ranks shut down their own."""
        self.local.shutdown()


class RankedBackend:
    """A Backend over all ranks of a run. `on_all`: every rank samples, not only rank 0."""

    def __init__(self, local: LocalBackend, hub: Hub, on_all: bool) -> None:
        self.local = local
        self.hub = hub
        assert isinstance(local.learner, RankedLearner)
        self.learner: RankedLearner = local.learner
        self.capabilities = local.capabilities
        self.engine: InferenceEngine = RankedEngine(local.engine, hub) if on_all else local.engine

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with the newest weights on every rank."""
        # A rank interrupted inside a collective would leave the others waiting in it.
        with deferred():
            self.hub.broadcast(partial(Worker.sync, step=step))
            with self.hub.blaming_failed_rank():
                self.local.sampler(step)
            self.hub.collect()
        return self.engine

    def frozen(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The student model, on this rank only."""
        return self.local.frozen(config, tokenizer, log, progress)

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimizer step: each rank computes gradients on its share; all apply their sum."""
        usable = [datum for datum in datums if datum.mask_T.any()]
        size = StepSize.of(usable)
        parts = balance_datums(usable, self.hub.rank_info.world)
        if self.learner.is_replicated:
            # With sharded weights a forward pass involves every rank, so rows that are not trained on are not checked.
            parts[0] += [datum for datum in datums if datum.check_T is not None]
        train = partial(Worker.train, size=size, step=step)
        self.hub.send({rank: partial(train, datums=part) for rank, part in enumerate(parts) if rank})
        with self.hub.blaming_failed_rank():
            metrics = self.learner.take_step(parts[0], size, step)
        self.hub.collect()
        self.learner.raise_if_rejected()
        return metrics | {"staleness": 0} | engine_metrics(self.local.engine)

    def save(self, path: Path) -> None:
        """Write the checkpoint that a single process would write; sharded ranks are gathered."""
        if self.learner.is_replicated:
            with self.hub.writing():
                self.local.save(path)
            return
        self.hub.broadcast(partial(Worker.save, path=path))
        with self.hub.blaming_failed_rank():
            self.local.save(path)
        self.hub.collect()

    def load(self, path: Path) -> None:
        """Restore a checkpoint on every rank."""
        self.hub.broadcast(partial(Worker.load, path=path))
        with self.hub.blaming_failed_rank():
            self.local.load(path)
        self.hub.collect()

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Shut down this rank's engine; the owner of the hub stops the other ranks."""
        self.local.close(ended_by)
