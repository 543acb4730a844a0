"""A frozen model beside the policy: its own base over the same tensors, or another model with weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from retrain.backends import FrozenModel
from retrain.config import TrainConfig
from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.inference_engine.pytorch.decoder import Row
from retrain.inference_engine.pytorch.engine import PyTorchEngine
from retrain.modeling.policy import Policy, load_policy
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling


def lend_frozen(
    policy: Policy, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
) -> FrozenModel:
    """The student of `[teaching]` on the policy's device, sampled in this process whatever samples the policy."""
    name = config.teaching.student_model
    inference = config.inference if config.inference.engine == "pytorch" else Inference()
    if policy.rank and not name:
        say(f"Student: {config.model.model} with the adapter off.")
        base = FrozenEngine(without_adapter(policy), inference, tokenizer, progress)
        return FrozenModel(base, policy.context_length)
    # What is trained as a whole has no adapter to switch off.
    model = _load(name or config.model.model, policy, config, say)
    engine: InferenceEngine
    if config.memory.offload_untrained_models and policy.device.type != "cpu":
        engine = OffloadedEngine(model, inference, tokenizer, progress)
    else:
        engine = FrozenEngine(model, inference, tokenizer, progress)
    return FrozenModel(engine, model.context_length)


def without_adapter(policy: Policy) -> Policy:
    """The model under the adapter, over the policy's own tensors."""
    twin = policy.twin()
    return replace(twin, adapted=twin.adapted.unload())


class FrozenEngine(PyTorchEngine):
    """Draws by seed and prompt, so that a question has one answer wherever it stands in a batch."""

    def _row(self, prompt: IntArray, index: int, sampling: Sampling, number: int) -> Row:
        own = replace(sampling, seed=derive_seed(sampling.seed, prompt.tobytes().hex()))
        return super()._row(prompt, index, own, number - index * sampling.n)


class OffloadedEngine:
    """A FrozenEngine whose weights are on the device only while it samples.

    It decodes without CUDA graphs, which would not outlive the move.
    """

    def __init__(self, policy: Policy, inference: Inference, tokenizer: Any, progress: Progress) -> None:
        self.policy = policy
        eager = {} if policy.own_attention else {"attention_kernel": "flash"}
        self.inference = inference.model_copy(update=eager)
        self.tokenizer = tokenizer
        self.progress = progress
        policy.causal_lm.to("cpu")

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Bring the weights over, draw, and take them away again."""
        self.policy.causal_lm.to(self.policy.device)
        try:
            engine = FrozenEngine(self.policy, self.inference, self.tokenizer, self.progress)
            return engine.generate(prompts, sampling)
        finally:
            self.policy.causal_lm.to("cpu")

    def sync(self, weights: object) -> None:
        """What is frozen takes nothing over."""

    def shutdown(self) -> None:
        """Nothing is held between uses."""


def _load(name: str, policy: Policy, config: TrainConfig, say: Callable[[str], None]) -> Policy:
    say(f"Loading student: {name} on {policy.device}...")
    # Arguments of the policy's loading are for that model alone.
    kwargs = config.model.init_kwargs if name == config.model.model else {}
    own = config.model.model_copy(update={"model": name, "lora_rank": 0, "init_kwargs": kwargs})
    try:
        student = load_policy(own, config.lora, config.training.seed, policy.device, lambda line: None)
    except ConfigError as error:
        raise ConfigError(f"[teaching] student_model = {name!r}: {error}") from error
    student.causal_lm.requires_grad_(False)
    return student
