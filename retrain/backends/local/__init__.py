"""Training in this process with PyTorch and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retrain.backends import Backend, Capabilities, FrozenModel
from retrain.backends.local.frozen import lend_frozen
from retrain.backends.local.learner import Learner
from retrain.backends.local.precision import make_agreement
from retrain.backends.local.sizes import load_sizes, save_sizes
from retrain.backends.local.split import SplitBackend, watched
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.inference_engine import Described, InferenceEngine, Progress, Remote
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.sampling import training_distribution
from retrain.plugins import REGISTRIES
from retrain.runtime.devices import AUTO, device_names, find_missing
from retrain.runtime.ranks import find_place
from retrain.types import Datum, StepMetrics

__all__ = ["LocalBackend", "build", "build_alone", "check_server", "make_engine", "resolve_devices"]


def build(config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress) -> Backend:
    """One device samples and trains in turn; with several, or a server running ahead, one samples while one trains."""
    place = find_place()
    if place is not None:
        raise ConfigError(
            f"this process is rank {place.rank} of {place.world}, and each would train a model of its own.  "
            "Try: retrain.distributed.run.train_on_ranks(config, place), or the command line"
        )
    return build_alone(config, tokenizer, say, progress)


def build_alone(config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress) -> Backend:
    """The same wherever this process stands among others, none of which is to help."""
    devices = resolve_devices(config.backend.devices, say)
    seed = config.training.seed
    say(f"Loading train model: {config.model.model} on {devices[-1]}...")
    policy = load_policy(config.model, config.lora, seed, devices[-1], say)
    policy.tokenizer = tokenizer
    mirror = None
    if len(devices) > 1:
        mirror = load_policy(config.model, config.lora, seed, devices[0], lambda line: None)
    elif config.training.async_steps and config.samples_separately:
        mirror = policy.twin()
    learner = Learner(policy, config, say)
    engine = make_engine(config, mirror or policy, tokenizer, say, progress)
    context = check_server(engine, config, say) if isinstance(engine, Remote) else policy.context_length
    learner.agreement = make_agreement(config, policy, engine, say)
    backend = LocalBackend(learner, engine) if mirror is None else SplitBackend(learner, mirror, engine)
    backend.capabilities = replace(
        backend.capabilities, context_length=context, gives_entropies=not isinstance(engine, Remote)
    )
    say(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode={len(devices) > 1}).")
    return backend


def make_engine(
    config: TrainConfig, policy: Policy, tokenizer: Any, say: Callable[[str], None], progress: Progress
) -> InferenceEngine:
    """The engine that a configuration names, over a policy."""
    if config.inference.starts_server:
        from retrain.inference_engine.http.launch import launch_engine  # noqa: PLC0415  (only where a server is started)

        return launch_engine(config, policy, tokenizer, say, progress)
    make: Any = REGISTRIES["engine"].load(config.inference.engine, config.plugins.search_paths)
    engine: InferenceEngine = make(policy, config.inference, tokenizer, progress)
    if isinstance(engine, Described):
        say(f"Engine: {engine.description}")
    return engine


def check_server(engine: Any, config: TrainConfig, say: Callable[[str], None]) -> int:
    """Refuse a server that is not fit for the run; gives its context length."""
    try:
        return int(engine.check(training_distribution(config), say))
    except BaseException:
        engine.shutdown()
        raise


class LocalBackend:
    """Sampling and training take turns on one device, over one copy of the weights."""

    def __init__(self, learner: Learner, engine: InferenceEngine) -> None:
        self.learner = learner
        self.engine = engine
        self.capabilities = Capabilities(
            context_length=learner.policy.context_length,
            gives_entropies=True,
            checks_rows=learner.agreement is not None,
        )

    def sampler(self, step: int) -> InferenceEngine:
        """The engine; it always sees the newest weights."""
        self.engine.sync(self.learner.policy)
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimiser step, done when this returns."""
        return self.learner.step(datums, step) | {"staleness": 0} | watched(self.engine)

    def save(self, path: Path) -> None:
        """Write adapter, optimizer and the sizes of batches."""
        self.learner.save(path)
        save_sizes(path, self.learner, self.engine)

    def load(self, path: Path) -> None:
        """Restore all of it."""
        self.learner.load(path)
        load_sizes(path, self.learner, self.engine)

    def frozen(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """A student beside the policy, on its device."""
        return lend_frozen(self.learner.policy, config, tokenizer, say, progress)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Let the engine free what it holds."""
        self.engine.shutdown()


def resolve_devices(text: str, say: Callable[[str], None]) -> list[torch.device]:
    """Devices in torch's terms. One that is not there is refused; `auto` is the first GPU, or else the CPU."""
    names = device_names(text)
    if names == [AUTO]:
        names = ["gpu:0"] if torch.cuda.device_count() else ["cpu"]
        if names == ["cpu"]:
            say('Warning: devices = "auto" found no GPU, so this run is on the CPU.')
    find_missing(text, torch.cuda.device_count())
    return [torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name[4:])) for name in names]
