"""A run of several processes: rank 0 runs the program, every other rank serves it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from retrain.assemble import Overrides
from retrain.backends import Backend
from retrain.config import TrainConfig
from retrain.distributed.backend import RankedBackend
from retrain.distributed.build import build_rank, samples_on_all
from retrain.distributed.links import Hub
from retrain.distributed.orders import Build
from retrain.distributed.worker import serve
from retrain.errors import ConfigError
from retrain.inference_engine import Progress
from retrain.runtime.ranks import Place, refuse_on_ranks
from retrain.tracking.console import Console
from retrain.trainer import TrainResult, train

# A rank waits for the slowest, however long that takes; one that is gone is noticed on the links.
PATIENCE = timedelta(days=1)
_ENDED: list[int] = []
"""Filled when the run is over, and with it the other processes."""


def train_on_ranks(
    config: TrainConfig,
    place: Place,
    force_resume: bool = False,
    console: Console | None = None,
    overrides: Overrides | None = None,
) -> TrainResult:
    """Run a configuration on rank 0 with the others' help. On every other rank this serves, and ends the process."""
    refuse_on_ranks(config)
    if _ENDED:
        raise ConfigError("the other ranks ended with the first run of this script.  Try: one run a script")
    uses_gpus = torch.cuda.is_available() and config.backend.devices != "cpu"
    if dist.is_initialized():
        # By transformers, when a script made its TrainingArguments: with other backends, and little patience.
        dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl" if uses_gpus else "gloo", timeout=PATIENCE)
    if not place.leads:
        code = serve(place)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: collectives that lost a member may hold threads that never end.
        os._exit(code)
    hub = Hub.open(place)

    def make_backend(config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress) -> Backend:
        hub.tell_all(Build(config))
        with hub.explained():
            own = build_rank(config, place, tokenizer, say, progress)
        hub.collect()
        return RankedBackend(own, hub, samples_on_all(config))

    try:
        return train(config, force_resume, console, replace(overrides or Overrides(), backend=make_backend))
    finally:
        _ENDED.append(place.rank)
        hub.close()
        if hub.failure is None:
            with suppress(RuntimeError):
                dist.destroy_process_group()
