"""Builds one rank's model, optimizer and engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from retrain.backends.local import LocalBackend, check_server, make_engine
from retrain.backends.local.precision import make_agreement
from retrain.config import TrainConfig
from retrain.distributed.fsdp import ShardedLearner, shard
from retrain.distributed.learner import RankedLearner
from retrain.errors import ConfigError
from retrain.inference_engine import InferenceEngine, Progress, Remote
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.devices import AUTO, check_gpus, device_names
from retrain.runtime.ranks import RankInfo
from retrain.types import Completion, IntArray, Sampling


def samples_on_all(config: TrainConfig) -> bool:
    """Whether every rank samples: only with the PyTorch engine, whose draws do not depend on the batch."""
    return config.inference.engine == "pytorch"


class NoEngine:
    """Engine of a rank that only trains."""

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Raises: this rank does not sample."""
        raise AssertionError("this rank does not sample")

    def sync(self, weights: object) -> None:
        """Does nothing: rank 0 sends weights to the server."""

    def shutdown(self) -> None:
        """Does nothing: there is nothing to free."""


def find_device(config: TrainConfig, rank_info: RankInfo, log: Callable[[str], None]) -> torch.device:
    """The device of a rank: the GPU with its local rank, or that entry of `[backend] devices`."""
    names = device_names(config.backend.devices)
    count = torch.cuda.device_count()
    if set(names) == {"cpu"}:
        return torch.device("cpu")
    if names == [AUTO] and not count:
        log(f'Warning: devices = "auto" found no GPU; {rank_info.local_world} ranks share the CPU.')
        return torch.device("cpu")
    if not count:
        check_gpus(config.backend.devices, count)
    numbers = [int(name[4:]) for name in names if name != "cpu"] if len(names) > 1 else list(range(count))
    if len(numbers) < rank_info.local_world or max(numbers) >= count:
        listed = f", of which [backend] devices allows {len(numbers)}" if len(names) > 1 else ""
        raise ConfigError(
            f"{rank_info.local_world} ranks on this machine need a GPU each, but it has {count}{listed}.  "
            f"Try: --processes {min(len(numbers), count)}"
        )
    return torch.device("cuda", numbers[rank_info.local_rank])


def build_rank(
    config: TrainConfig, rank_info: RankInfo, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
) -> LocalBackend:
    """Load the model, and the engine if this rank samples."""
    device = find_device(config, rank_info, log)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    log(f"Loading train model: {config.model.model} on {device}, {rank_info.world} ranks...")
    samples = rank_info.is_main or samples_on_all(config)
    make = _build_sharded if config.distributed.fsdp else _build_replicated
    learner, policy = make(config, device, samples, log)
    if policy is not None:
        policy.tokenizer = tokenizer
    engine: InferenceEngine = NoEngine()
    if samples and policy is not None:
        engine = make_engine(config, policy, tokenizer, log, progress)
    backend = RankBackend(learner, engine)
    if isinstance(engine, Remote):
        context = check_server(engine, config, log)
        backend.capabilities = replace(backend.capabilities, context_length=context, gives_entropies=False)
    learner.agreement = make_agreement(config, learner.policy, engine, log)
    backend.capabilities = replace(backend.capabilities, checks_rows=True)
    log(f"LocalTrainHelper ready (engine={config.inference.engine}, ranks={rank_info.world}).")
    return backend


Log = Callable[[str], None]
Built = tuple[RankedLearner, Policy | None]
"""A learner, and the full policy that this rank samples from and saves."""


def _build_replicated(config: TrainConfig, device: torch.device, samples: bool, log: Log) -> Built:
    policy = load_policy(config.model, config.lora, config.training.seed, device, log)
    return RankedLearner(policy, config, log), policy


def _build_sharded(config: TrainConfig, device: torch.device, samples: bool, log: Log) -> Built:
    """Shards to train on, plus a full copy if this rank samples or verifies a server's samples.

    The copy stays in CPU memory when weights are not gathered on the device.
    """
    dtype = config.model.dtype if config.model.dtype != "auto" else "fp32" if device.type == "cpu" else "bf16"
    model, seed = config.model.model_copy(update={"dtype": dtype}), config.training.seed
    cpu = torch.device("cpu")
    mirror = None
    if samples:
        where = device if config.distributed.gather_for_generation else cpu
        mirror = load_policy(model, config.lora, seed, where, lambda line: None)
    policy = load_policy(model, config.lora, seed, cpu, log)
    return ShardedLearner(shard(policy, device), config, log, mirror), mirror


class RankBackend(LocalBackend):
    """One rank's backend: sharded weights are gathered before they are handed to the engine."""

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with the newest weights. With sharded weights every rank must call this."""
        assert isinstance(self.learner, RankedLearner)
        self.engine.sync(self.learner.gathered_policy())
        return self.engine
