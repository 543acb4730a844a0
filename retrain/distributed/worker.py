"""What every rank but the first does: obey orders until the run is over."""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from retrain.backends.local import LocalBackend
from retrain.config import TrainConfig
from retrain.distributed.build import build_rank
from retrain.distributed.learner import RankedLearner
from retrain.distributed.links import AbandonedError, Link, has_lost_peer
from retrain.distributed.orders import Build, Load, Order, Sample, Save, Sync, Train
from retrain.errors import BackendError
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.interrupts import SIGNALS
from retrain.runtime.ranks import Place
from retrain.seeding import derive_seed


class Worker:
    """One rank's model, and how it is used."""

    def __init__(self, place: Place, link: Link) -> None:
        self.place = place
        self.link = link
        self.config: TrainConfig | None = None
        self.backend: LocalBackend | None = None

    def serve(self) -> None:
        """Obey until the run is over."""
        while (order := self.link.next()) is not None:
            try:
                answer = self.obey(order)
            except AbandonedError:
                answer = None
            self.link.answer(answer)

    def obey(self, order: Order) -> Any:
        """Do what is asked and give what came of it."""
        if isinstance(order, Build):
            self._build(order.config)
            return None
        assert self.backend is not None and self.config is not None
        match order:
            case Sync():
                self.backend.sampler(order.step)
            case Sample():
                return self.backend.engine.generate(order.prompts, order.sampling)
            case Train():
                # Dropout: what ranks draw must differ from one another, and be the same when the step is repeated.
                torch.manual_seed(derive_seed(self.config.training.seed, f"rank/{self.place.rank}", order.step))
                assert isinstance(self.backend.learner, RankedLearner)
                self.backend.learner.take_step(order.datums, order.size, order.step)
            case Save():
                self.backend.save(order.path)
            case Load():
                self._require(order.path)
                self.backend.load(order.path)
        return None

    def _build(self, config: TrainConfig) -> None:
        self.config = config
        tokenizer = load_tokenizer(config.model.model)

        def log(line: str) -> None:
            print(line, flush=True)

        def progress(phase: str, done: int, total: int) -> None:
            # Engines report while they sample: the place to stop when nobody waits for the completions.
            self.link.raise_if_abandoned()

        self.backend = build_rank(config, self.place, tokenizer, log, progress)

    def _require(self, path: Path) -> None:
        if not path.is_dir():
            raise BackendError(
                f"rank {self.place.rank} cannot see {path}.  Try: a log_dir on a file system that all machines share"
            )


def serve(place: Place) -> int:
    """Run a worker; its exit code."""
    for number in SIGNALS:
        # The run's end is rank 0's to decide; it will say so.
        signal.signal(number, signal.SIG_IGN)
    link = Link.open(place)
    worker = Worker(place, link)
    try:
        worker.serve()
    except Exception as error:
        trace = traceback.format_exc()
        print(f"Rank {place.rank} failed:\n{trace}", file=sys.stderr, flush=True)
        link.fail(trace, has_lost_peer(error))
        return 1
    finally:
        if worker.backend is not None:
            worker.backend.close(None)
    return 0
