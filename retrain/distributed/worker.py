"""The loop of every rank but the first: execute commands until the run is over."""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

import torch

from retrain.backends.local import LocalBackend
from retrain.config import TrainConfig
from retrain.distributed.build import build_rank
from retrain.distributed.commands import Build, Load, RankCommand, Sample, Save, Sync, Train
from retrain.distributed.learner import RankedLearner
from retrain.distributed.links import CommandAbandoned, Link, is_lost_peer
from retrain.errors import BackendError
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.interrupts import SIGNALS
from retrain.runtime.ranks import RankInfo
from retrain.seeding import derive_seed


class Worker:
    """Executes commands on one rank's backend."""

    def __init__(self, rank_info: RankInfo, link: Link) -> None:
        self.rank_info = rank_info
        self.link = link
        self.config: TrainConfig | None = None
        self.backend: LocalBackend | None = None

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
        if isinstance(command, Build):
            self._build(command.config)
            return None
        assert self.backend is not None and self.config is not None
        match command:
            case Sync():
                self.backend.sampler(command.step)
            case Sample():
                return self.backend.engine.generate(command.prompts, command.sampling)
            case Train():
                # Dropout masks must differ between ranks, and be the same when the step is repeated.
                torch.manual_seed(derive_seed(self.config.training.seed, f"rank/{self.rank_info.rank}", command.step))
                assert isinstance(self.backend.learner, RankedLearner)
                self.backend.learner.take_step(command.datums, command.size, command.step)
            case Save():
                self.backend.save(command.path)
            case Load():
                self._require(command.path)
                self.backend.load(command.path)
        return None

    def _build(self, config: TrainConfig) -> None:
        self.config = config
        tokenizer = load_tokenizer(config.model.model)

        def log(line: str) -> None:
            print(line, flush=True)

        def progress(phase: str, done: int, total: int) -> None:
            # Engines report while they sample: sampling is cancelled here if rank 0 no longer waits for it.
            self.link.raise_if_abandoned()

        self.backend = build_rank(config, self.rank_info, tokenizer, log, progress)

    def _require(self, path: Path) -> None:
        if not path.is_dir():
            raise BackendError(f"rank {self.rank_info.rank} cannot see {path}.  Try: a log_dir on a shared file system")


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
        trace = traceback.format_exc()
        print(f"Rank {rank_info.rank} failed:\n{trace}", file=sys.stderr, flush=True)
        link.fail(trace, is_lost_peer(error))
        return 1
    finally:
        if worker.backend is not None:
            worker.backend.close(None)
    return 0
