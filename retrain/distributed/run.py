"""Multi-process training: rank 0 runs the training loop, the other ranks execute its commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from retrain.assemble import Overrides
from retrain.backends import Backend
from retrain.checks.processes import check_multi_process
from retrain.config import TrainConfig
from retrain.distributed.backend import RankedBackend
from retrain.distributed.build import build_rank, samples_on_all
from retrain.distributed.links import Hub
from retrain.distributed.worker import Worker, serve
from retrain.errors import ConfigError
from retrain.inference_engine import Progress
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.ranks import RankInfo
from retrain.tracking.console import Console
from retrain.trainer import TrainResult, train

# Ranks wait for the slowest one, however long that takes; a lost rank is noticed by its control connection.
COLLECTIVE_TIMEOUT = timedelta(days=1)
_ENDED: list[int] = []
"""Non-empty once a run is over; the other processes have ended with it."""


def train_on_ranks(
    config: TrainConfig,
    rank_info: RankInfo,
    force_resume: bool = False,
    console: Console | None = None,
    overrides: Overrides | None = None,
) -> TrainResult:
    """Train on all ranks. Returns on rank 0; on the other ranks it executes commands, then ends the process."""
    check_multi_process(config)
    if _ENDED:
        raise ConfigError("the other ranks ended with the first run of this script.  Try: one run per script")
    uses_gpus = torch.cuda.is_available() and config.backend.devices != "cpu"
    if dist.is_initialized():
        # transformers initializes it with TrainingArguments, with another backend and a short timeout.
        dist.destroy_process_group()
    # Where accelerate asks for FSDP, transformers would load zeros on all ranks but one, for accelerate to fill in.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    dist.init_process_group("cpu:gloo,cuda:nccl" if uses_gpus else "gloo", timeout=COLLECTIVE_TIMEOUT)
    if not rank_info.is_main:
        code = serve(rank_info)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: a collective that lost a rank may hold threads that never end.
        os._exit(code)
    hub = Hub.open(rank_info)

    def make_backend(
        config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> Backend:
        hub.broadcast(partial(Worker.build, config=config))
        with hub.blaming_failed_rank():
            own = build_rank(config, rank_info, tokenizer, log, progress)
        hub.collect()
        return RankedBackend(own, hub, samples_on_all(config))

    try:
        return train(config, force_resume, console, replace(overrides or Overrides(), backend=make_backend))
    finally:
        _ENDED.append(rank_info.rank)
        hub.close()
        if hub.failure is None:
            with suppress(RuntimeError):
                dist.destroy_process_group()
