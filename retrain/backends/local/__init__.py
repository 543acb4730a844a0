"""Local training with PyTorch and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retrain.backends import Backend, Capabilities, FrozenModel
from retrain.backends.local.early import EarlyGradients
from retrain.backends.local.frozen import build_frozen
from retrain.backends.local.learner import Learner
from retrain.backends.local.memory import training_bytes
from retrain.backends.local.precision import make_agreement
from retrain.backends.local.sizes import load_sizes, save_sizes
from retrain.backends.local.split import SplitBackend, engine_metrics
from retrain.config import TrainConfig
from retrain.config.reasons import trains_complete_steps
from retrain.errors import ConfigError
from retrain.inference_engine import Described, HoldsMemory, IncrementalEngine, InferenceEngine, Progress, Remote
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.spec import ServerSpec
from retrain.modeling.compiling import start_compiler
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.sampling import training_distribution
from retrain.modeling.tokens import Tokenizer
from retrain.plugins import REGISTRIES
from retrain.runtime.devices import AUTO, check_gpus, device_names
from retrain.runtime.ranks import find_rank_info
from retrain.types import Datum, Obstacle, StepMetrics

__all__ = ["LocalBackend", "build", "check_server", "make_engine", "resolve_devices"]


def build(config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress) -> Backend:
    """Sampling and training alternate on one device; with several devices, or `async_steps`, they overlap."""
    rank_info = find_rank_info()
    if rank_info is not None:
        raise ConfigError(
            f"this process is rank {rank_info.rank} of {rank_info.world}, and each would train its own model.  "
            "Try: retrain.distributed.run.train_on_ranks(config, rank_info), or the command line"
        )
    devices = resolve_devices(config.backend.devices, log)
    seed = config.training.seed
    if devices[-1].type == "cuda":
        start_compiler()
    log(f"Loading train model: {config.model.model} on {devices[-1]}...")
    policy = load_policy(config.model, config.lora, seed, devices[-1], log)
    policy.tokenizer = tokenizer
    mirror = None
    if len(devices) > 1:
        mirror = load_policy(config.model, config.lora, seed, devices[0], lambda line: None)
    elif config.training.async_steps and config.samples_separately:
        mirror = replace(policy.clone_with_new_adapter(), is_trained_while_sampled=True)
    learner = Learner(policy, config, log)
    with ExitStack() as kernels:
        if mirror is not None:
            kernels.enter_context(learner.determinism.kernels())
        engine = make_engine(config, mirror or policy, tokenizer, log, progress)
        context = check_server(engine, config, log) if isinstance(engine, Remote) else policy.context_length
        learner.agreement = make_agreement(config, policy, engine, log)
        backend = (
            LocalBackend(learner, engine)
            if mirror is None
            else SplitBackend(learner, mirror, engine, kernels.pop_all())
        )
    backend.capabilities = replace(
        backend.capabilities, context_length=context, gives_entropies=not isinstance(engine, Remote)
    )
    log(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode={len(devices) > 1}).")
    return backend


def make_engine(
    config: TrainConfig, policy: Policy, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
) -> InferenceEngine:
    """The configured engine, over a policy."""
    policy.is_trained_while_sampled |= config.training.overlap is True
    policy.training_bytes = training_bytes(policy, config)
    if config.inference.starts_server:
        from retrain.inference_engine.http.launch import launch_engine  # noqa: PLC0415  (only where a server is started)

        return launch_engine(config, policy, tokenizer, log, progress)
    found: Any = REGISTRIES["engine"].load(config.inference.engine, config.plugins.search_paths)
    if isinstance(found, ServerSpec):
        return HttpEngine(found, policy, config.inference, tokenizer, progress)
    engine: InferenceEngine = found(policy, config.inference, tokenizer, progress)
    if isinstance(engine, Described):
        log(f"Engine: {engine.description}")
    return engine


def check_server(engine: Remote, config: TrainConfig, log: Callable[[str], None]) -> int:
    """Validate the server; returns its context length."""
    try:
        return int(engine.check(training_distribution(config), log))
    except BaseException:
        engine.shutdown()
        raise


class LocalBackend:
    """Sampling and training alternate, or overlap within a step, over one copy of the weights."""

    def __init__(self, learner: Learner, engine: InferenceEngine) -> None:
        self.learner = learner
        self.engine = engine
        self.early: EarlyGradients | None = None
        """Gradients of the current step, in an overlapped run."""
        self.capabilities = Capabilities(
            context_length=learner.policy.context_length,
            gives_entropies=True,
            checks_rows=learner.agreement is not None,
        )
        if isinstance(engine, HoldsMemory):
            learner.memory.reclaim = engine.release_memory

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with the newest weights."""
        self.engine.sync(self.learner.policy)
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimizer step."""
        part = self.early.collect() if self.early is not None else None
        return self.learner.step(datums, step, part=part) | {"staleness": 0} | engine_metrics(self.engine)

    def overlap_obstacle(self) -> Obstacle | None:
        """Sampling elsewhere can overlap with training; on the same device it can, but may not be faster."""
        reason = trains_complete_steps(self.learner.config)
        if reason:
            return Obstacle(reason, is_final=True)
        if not isinstance(self.engine, IncrementalEngine):
            return Obstacle("the engine returns the completions of a step together", is_final=True)
        if not isinstance(self.engine, Remote):
            return Obstacle(f"sampling and training share {self.learner.policy.device}", is_final=False)
        return None

    def accumulate(self, part: int, datums: Sequence[Datum]) -> None:
        """Compute the gradients of some rows of the step, on a thread."""
        self.early = self.early or EarlyGradients(self.learner)
        self.early.add(part, datums)

    def discard_parts(self) -> None:
        """Drop the gradients of the step."""
        if self.early is not None:
            self.early.discard()

    def save(self, path: Path) -> None:
        """Write adapter, optimizer state and batch sizes."""
        self.learner.save(path)
        save_sizes(path, self.learner, self.engine)

    def load(self, path: Path) -> None:
        """Restore them."""
        self.learner.load(path)
        load_sizes(path, self.learner, self.engine)

    def frozen(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The student, on the policy's device."""
        return build_frozen(self.learner.policy, config, tokenizer, log, progress)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Shut the engine down."""
        if self.early is not None:
            self.early.close()
        self.engine.shutdown()


def resolve_devices(text: str, log: Callable[[str], None]) -> list[torch.device]:
    """Torch devices; raises if one is missing. `auto` is the first GPU, or else the CPU."""
    names = device_names(text)
    if names == [AUTO]:
        names = ["gpu:0"] if torch.cuda.device_count() else ["cpu"]
        if names == ["cpu"]:
            log('Warning: devices = "auto" found no GPU, so this run is on the CPU.')
    check_gpus(text, torch.cuda.device_count())
    return [torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name[4:])) for name in names]
