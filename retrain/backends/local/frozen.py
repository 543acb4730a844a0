"""A frozen model in addition to the policy: its base model over the same tensors, or a separate model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from retrain.backends import FrozenModel
from retrain.config import TrainConfig
from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.inference_engine.pytorch.decoder import Row
from retrain.inference_engine.pytorch.engine import PyTorchEngine
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.tokens import Tokenizer
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling


def build_frozen(
    policy: Policy, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
) -> FrozenModel:
    """The student of `[teaching]` on the policy's device, always sampled in this process."""
    name = config.teaching.student_model
    inference = config.inference if config.inference.engine == "pytorch" else Inference()
    if policy.rank and not name:
        log(f"Student: {config.model.model} with the adapter off.")
        base = FrozenEngine(without_adapter(policy), inference, tokenizer, progress)
        return FrozenModel(base, policy.context_length)
    # Full fine-tuning has no adapter to disable.
    model = _load(name or config.model.model, policy, config, log)
    engine: InferenceEngine
    if config.memory.offload_untrained_models and policy.device.type != "cpu":
        engine = OffloadedEngine(model, inference, tokenizer, progress)
    else:
        engine = FrozenEngine(model, inference, tokenizer, progress)
    return FrozenModel(engine, model.context_length)


def without_adapter(policy: Policy) -> Policy:
    """The base model, over the policy's tensors."""
    clone = policy.clone_with_new_adapter()
    return replace(clone, adapted=clone.peft.unload())


class FrozenEngine(PyTorchEngine):
    """Samples by seed and prompt, independent of the prompt's position in the batch."""

    def _row(self, prompt: IntArray, index: int, sampling: Sampling, number: int) -> Row:
        own = replace(sampling, seed=derive_seed(sampling.seed, prompt.tobytes().hex()))
        return super()._row(prompt, index, own, number - index * sampling.n)


class OffloadedEngine:
    """A FrozenEngine whose weights are on the device only while it samples.

    It decodes without CUDA graphs, which the moves would invalidate.
    """

    def __init__(self, policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> None:
        self.policy = policy
        eager = {} if policy.attention_fallback_reason else {"attention_kernel": "flash"}
        self.inference = inference.model_copy(update=eager)
        self.tokenizer = tokenizer
        self.progress = progress
        policy.causal_lm.to("cpu")

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Move the weights to the device, sample, and move them back."""
        self.policy.causal_lm.to(self.policy.device)
        try:
            engine = FrozenEngine(self.policy, self.inference, self.tokenizer, self.progress)
            return engine.generate(prompts, sampling)
        finally:
            self.policy.causal_lm.to("cpu")

    def sync(self, weights: object) -> None:
        """Does nothing: the weights are frozen."""

    def shutdown(self) -> None:
        """Does nothing: no memory is held between uses."""


def _load(name: str, policy: Policy, config: TrainConfig, log: Callable[[str], None]) -> Policy:
    log(f"Loading student: {name} on {policy.device}...")
    # init_kwargs apply to the policy's model only.
    kwargs = config.model.init_kwargs if name == config.model.model else {}
    own = config.model.model_copy(update={"model": name, "lora_rank": 0, "init_kwargs": kwargs})
    try:
        student = load_policy(own, config.lora, config.training.seed, policy.device, lambda line: None)
    except ConfigError as error:
        raise ConfigError(f"[teaching] student_model = {name!r}: {error}") from error
    student.causal_lm.requires_grad_(False)
    return student
