"""One rank's model, optimiser and engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from retrain.backends.local import LocalBackend, check_server, make_engine
from retrain.backends.local.precision import make_agreement
from retrain.config import TrainConfig
from retrain.distributed.fsdp import ShardedLearner, shard
from retrain.distributed.learner import RankedLearner
from retrain.errors import ConfigError
from retrain.inference_engine import InferenceEngine, Progress, Remote
from retrain.modeling.policy import Policy, load_policy
from retrain.runtime.devices import AUTO, device_names, find_missing
from retrain.runtime.ranks import Place


def samples_on_all(config: TrainConfig) -> bool:
    """Whether every rank samples. Other engines have a place of their own, or do not number what they draw."""
    return config.inference.engine == "pytorch"


class NoEngine:
    """In place of an engine on a rank that only trains."""

    def generate(self, prompts: Any, sampling: Any) -> Any:
        """Nobody asks."""
        raise AssertionError("this rank does not sample")

    def sync(self, weights: object) -> None:
        """Rank 0 hands weights to the server."""

    def shutdown(self) -> None:
        """It holds nothing."""


def find_device(config: TrainConfig, place: Place, say: Callable[[str], None]) -> torch.device:
    """The device of a rank: the GPU of its number on its machine, or of that place among several in the file."""
    names = device_names(config.backend.devices)
    count = torch.cuda.device_count()
    if set(names) == {"cpu"}:
        return torch.device("cpu")
    if names == [AUTO] and not count:
        say(f'Warning: devices = "auto" found no GPU; {place.local_world} ranks share the CPU.')
        return torch.device("cpu")
    if not count:
        find_missing(config.backend.devices, count)
    numbers = [int(name[4:]) for name in names if name != "cpu"] if len(names) > 1 else list(range(count))
    if len(numbers) < place.local_world or max(numbers) >= count:
        listed = f", of which [backend] devices allows {len(numbers)}" if len(names) > 1 else ""
        raise ConfigError(
            f"{place.local_world} ranks on this machine need a GPU each, but it has {count}{listed}.  "
            f"Try: --processes {min(len(numbers), count)}"
        )
    return torch.device("cuda", numbers[place.local_rank])


def build_rank(
    config: TrainConfig, place: Place, tokenizer: Any, say: Callable[[str], None], progress: Progress
) -> LocalBackend:
    """Load the model, and the engine where this rank samples."""
    device = find_device(config, place, say)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    say(f"Loading train model: {config.model.model} on {device}, {place.world} ranks...")
    samples = place.leads or samples_on_all(config)
    make = _build_sharded if config.distributed.fsdp or config.distributed.zero_stage else _build_whole
    learner, policy = make(config, device, samples, say)
    if policy is not None:
        policy.tokenizer = tokenizer
    engine: InferenceEngine = NoEngine()
    if samples and policy is not None:
        engine = make_engine(config, policy, tokenizer, say, progress)
    backend = RankBackend(learner, engine)
    if isinstance(engine, Remote):
        context = check_server(engine, config, say)
        backend.capabilities = replace(backend.capabilities, context_length=context, gives_entropies=False)
    learner.agreement = make_agreement(config, learner.policy, engine, say)
    backend.capabilities = replace(backend.capabilities, checks_rows=True)
    say(f"LocalTrainHelper ready (engine={config.inference.engine}, ranks={place.world}).")
    return backend


Say = Callable[[str], None]
Built = tuple[RankedLearner, Policy | None]
"""A learner, and the whole policy that this rank samples from and saves."""


def _build_whole(config: TrainConfig, device: torch.device, samples: bool, say: Say) -> Built:
    policy = load_policy(config.model, config.lora, config.training.seed, device, say)
    return RankedLearner(policy, config, say), policy


def _build_sharded(config: TrainConfig, device: torch.device, samples: bool, say: Say) -> Built:
    """Shards to train on, and beside them a whole copy where this rank samples, or rank 0 proves what a server did.

    The copy is in main memory when weights are not to be gathered on the device.
    """
    dtype = config.model.dtype if config.model.dtype != "auto" else "fp32" if device.type == "cpu" else "bf16"
    model, seed = config.model.model_copy(update={"dtype": dtype}), config.training.seed
    cpu = torch.device("cpu")
    if config.distributed.zero_stage:
        from retrain.distributed.zero import ZeroLearner  # noqa: PLC0415  (slow to import, and seldom asked for)
    mirror = None
    if samples and config.distributed.zero_stage != 1:
        where = device if config.distributed.gather_for_generation else cpu
        mirror = load_policy(model, config.lora, seed, where, lambda line: None)
    if config.distributed.fsdp:
        policy = load_policy(model, config.lora, seed, cpu, say)
        return ShardedLearner(shard(policy, device), config, say, mirror), mirror
    policy = load_policy(model, config.lora, seed, device, say)
    return ZeroLearner(policy, config, say, mirror), mirror or policy


class RankBackend(LocalBackend):
    """One rank's part of a backend: a sharded learner hands its weights to the engine as a whole."""

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with the newest weights. Where they are sharded, every rank must call this."""
        assert isinstance(self.learner, RankedLearner)
        self.engine.sync(self.learner.whole_policy())
        return self.engine
