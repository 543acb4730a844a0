"""One frozen model shared by several runs in one process, each with its own adapter and optimizer.

The adapter's parameters point at the tensors of the run that is using the model; nothing is copied. Runs must take
turns: only one may sample or train at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from retrain.backends.local import LocalBackend, make_engine, resolve_devices
from retrain.backends.local.learner import Learner
from retrain.backends.local.precision import make_agreement
from retrain.config import TrainConfig
from retrain.inference_engine import InferenceEngine, Progress
from retrain.modeling.policy import Policy, fresh_adapter, load_policy
from retrain.modeling.tokens import Tokenizer
from retrain.types import Datum, StepMetrics


class SharedModel:
    """The model and its engine, loaded for the first run."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.engine: InferenceEngine | None = None
        self.progress: Progress = lambda phase, done, total: None
        """Progress of the run that has the turn."""

    def build(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> SharedBackend:
        """A backend for one more run. The caller has checked that all runs use the same model and engine."""
        seed = config.training.seed
        if self.policy is None:
            (device,) = resolve_devices(config.backend.devices, log)
            log(f"Loading train model: {config.model.model} on {device}...")
            self.policy = load_policy(config.model, config.lora, seed, device, log)
            self.engine = make_engine(config, self.policy, tokenizer, log, lambda *at: self.progress(*at))
        else:
            log(f"Sharing train model: {config.model.model} on {self.policy.device}")
            point_at(self.policy, fresh_adapter(self.policy, seed))
        assert self.engine is not None
        learner = Learner(self.policy, config, log)
        learner.agreement = make_agreement(config, self.policy, self.engine, log)
        backend = SharedBackend(learner, self.engine, self, progress)
        log(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode=False).")
        return backend


class SharedBackend(LocalBackend):
    """A LocalBackend that swaps its adapter in before every use of the model."""

    def __init__(self, learner: Learner, engine: InferenceEngine, model: SharedModel, progress: Progress) -> None:
        super().__init__(learner, engine)
        self.model = model
        self.progress = progress
        self.tensors = [parameter.data for parameter in trained_parameters(learner.policy)]

    def _take_model(self) -> None:
        point_at(self.learner.policy, self.tensors)
        self.model.progress = self.progress

    def sampler(self, step: int) -> InferenceEngine:
        """The engine, with this run's adapter merged."""
        self._take_model()
        return super().sampler(step)

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One optimizer step on this run's adapter."""
        self._take_model()
        return super().train_step(datums, step)

    def save(self, path: Path) -> None:
        """Write this run's adapter and optimizer state."""
        self._take_model()
        super().save(path)

    def load(self, path: Path) -> None:
        """Restore them."""
        self._take_model()
        super().load(path)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Does nothing: the other runs still use the engine."""


def trained_parameters(policy: Policy) -> list[nn.Parameter]:
    """The adapter's parameters, in the model's order."""
    return [parameter for parameter in policy.adapted.parameters() if parameter.requires_grad]


def point_at(policy: Policy, tensors: Sequence[Tensor]) -> None:
    """Make the adapter use these tensors."""
    for parameter, tensor in zip(trained_parameters(policy), tensors, strict=True):
        parameter.data = tensor
