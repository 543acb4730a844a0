"""One frozen model for several runs of one process: each has an adapter and an optimiser of its own.

The adapter's parameters are pointed at the tensors of whichever run is using the model; nothing is copied. Runs must
take turns: a run that samples or trains has the model to itself until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from retrain.backends.local import LocalBackend, make_engine, resolve_devices
from retrain.backends.local.learner import Learner
from retrain.backends.local.precision import make_agreement
from retrain.config import TrainConfig
from retrain.inference_engine import InferenceEngine, Progress
from retrain.modeling.policy import Policy, fresh_adapter, load_policy
from retrain.types import Datum, StepMetrics


class SharedModel:
    """The model and its engine, loaded for the first run that asks."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.engine: InferenceEngine | None = None
        self.progress: Progress = lambda phase, done, total: None
        """That of the run whose turn it is."""

    def build(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> SharedBackend:
        """A backend for one more run. The caller has made sure that all of them agree on model and engine."""
        seed = config.training.seed
        if self.policy is None:
            (device,) = resolve_devices(config.backend.devices, say)
            say(f"Loading train model: {config.model.model} on {device}...")
            self.policy = load_policy(config.model, config.lora, seed, device, say)
            self.engine = make_engine(config, self.policy, tokenizer, say, lambda *at: self.progress(*at))
        else:
            say(f"Sharing train model: {config.model.model} on {self.policy.device}")
            point_at(self.policy, fresh_adapter(self.policy, seed))
        assert self.engine is not None
        learner = Learner(self.policy, config, say)
        learner.agreement = make_agreement(config, self.policy, self.engine, say)
        backend = SharedBackend(learner, self.engine, self, progress)
        say(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode=False).")
        return backend


class SharedBackend(LocalBackend):
    """A LocalBackend that puts its own adapter in place before every use of the model."""

    def __init__(self, learner: Learner, engine: InferenceEngine, model: SharedModel, progress: Progress) -> None:
        super().__init__(learner, engine)
        self.model = model
        self.progress = progress
        self.tensors = [parameter.data for parameter in trained_parameters(learner.policy)]

    def _take_model(self) -> None:
        point_at(self.learner.policy, self.tensors)
        self.model.progress = self.progress

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with this run's adapter folded in."""
        self._take_model()
        return super().sampler(step)

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimiser step of this run's adapter."""
        self._take_model()
        return super().train_step(datums, step)

    def save(self, path: Path) -> None:
        """Write this run's adapter and optimiser."""
        self._take_model()
        super().save(path)

    def load(self, path: Path) -> None:
        """Restore them."""
        self._take_model()
        super().load(path)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Nothing: the other runs go on with the engine."""


def trained_parameters(policy: Policy) -> list[nn.Parameter]:
    """The adapter's parameters, in the order in which the model names them."""
    return [parameter for parameter in policy.adapted.parameters() if parameter.requires_grad]


def point_at(policy: Policy, tensors: Sequence[Tensor]) -> None:
    """Let the adapter be these tensors from now on."""
    for parameter, tensor in zip(trained_parameters(policy), tensors, strict=True):
        parameter.data = tensor
