"""The loop of every rank but the first: execute commands until the run is over."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from retrain.backends.local import LocalBackend
from retrain.backends.local.learner import StepSize
from retrain.config import TrainConfig
from retrain.distributed.build import build_rank
from retrain.distributed.learner import RankedLearner
from retrain.distributed.links import CommandAbandoned, Link, RankCommand, is_lost_peer
from retrain.errors import BackendError
from retrain.isolation.redaction import redact
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.interrupts import SIGNALS
from retrain.runtime.ranks import RankInfo
from retrain.seeding import derive_seed
from retrain.types import Completion, Datum, IntArray, Sampling


class Worker:
    """One rank's backend. A command of rank 0 is one of these methods with its arguments."""

    backend: LocalBackend

    def __init__(self, rank_info: RankInfo, link: Link) -> None:
        self.rank_info = rank_info
        self.link = link
        self.is_built = False

    def serve(self) -> None:
        """Execute commands until the run is over."""
        while (command := self.link.next()) is not None:
            try:
                result = self.execute(command)
            except CommandAbandoned:
                result = None
            self.link.reply(result)

    def execute(self, command: RankCommand) -> object:
        """Execute a command; returns its result."""
        return command(self)

    def build(self, config: TrainConfig) -> None:
        """Load the model."""
        self.seed = config.training.seed
        tokenizer = load_tokenizer(config.model.model)

        def log(line: str) -> None:
            print(redact(line), flush=True)

        def progress(phase: str, done: int, total: int) -> None:
            # Engines report while they sample: sampling is cancelled here if rank 0 no longer waits for it.
            self.link.raise_if_abandoned()

        self.backend = build_rank(config, self.rank_info, tokenizer, log, progress)
        self.is_built = True

    def sync(self, step: int) -> None:
        """Sync the newest weights to the engine."""
        self.backend.sampler(step)

    def sample(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample completions for these prompts."""
        return self.backend.engine.generate(prompts, sampling)

    def train(self, datums: Sequence[Datum], size: StepSize, step: int) -> None:
        """Train on these datums; `size` is that of the global step."""
        # Dropout masks must differ between ranks, and be the same when the step is repeated.
        torch.manual_seed(derive_seed(self.seed, f"rank/{self.rank_info.rank}", step))
        assert isinstance(self.backend.learner, RankedLearner)
        self.backend.learner.take_step(datums, size, step)

    def save(self, path: Path) -> None:
        """Take part in gathering a checkpoint, which rank 0 writes."""
        self.backend.save(path)

    def load(self, path: Path) -> None:
        """Restore a checkpoint."""
        if not path.is_dir():
            raise BackendError(f"rank {self.rank_info.rank} cannot see {path}.  Try: a log_dir on a shared file system")
        self.backend.load(path)


def serve(rank_info: RankInfo) -> int:
    """Run a worker; returns its exit code."""
    for number in SIGNALS:
        # Rank 0 decides when the run ends.
        signal.signal(number, signal.SIG_IGN)
    link = Link.open(rank_info)
    worker = Worker(rank_info, link)
    try:
        worker.serve()
    except Exception as error:
        trace = redact(traceback.format_exc())
        print(f"Rank {rank_info.rank} failed:\n{trace}", file=sys.stderr, flush=True)
        link.fail(trace, is_lost_peer(error))
        return 1
    finally:
        if worker.is_built:
            worker.backend.close(None)
    return 0
