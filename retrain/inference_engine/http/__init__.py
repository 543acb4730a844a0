"""Engines that sample on a server: one client, and a specification per kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.config.schema import Inference
from retrain.inference_engine import InferenceEngine, Progress
from retrain.inference_engine.http.servers import MLX, OPENAI, SGLANG, VLLM, ServerSpec

if TYPE_CHECKING:
    from retrain.modeling.policy import Policy
    from retrain.modeling.tokens import Tokenizer

__all__ = ["mlx", "openai", "sglang", "vllm"]


def vllm(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> InferenceEngine:
    """Engine for vLLM servers."""
    return _engine(VLLM, policy, inference, tokenizer, progress)


def sglang(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> InferenceEngine:
    """Engine for SGLang servers."""
    return _engine(SGLANG, policy, inference, tokenizer, progress)


def mlx(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> InferenceEngine:
    """Engine for mlx-lm servers."""
    return _engine(MLX, policy, inference, tokenizer, progress)


def openai(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> InferenceEngine:
    """Engine for servers with vLLM's API."""
    return _engine(OPENAI, policy, inference, tokenizer, progress)


def _engine(
    spec: ServerSpec, policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress
) -> InferenceEngine:
    # `retrain doctor` reads the specifications only, and PyTorch takes seconds to import.
    from retrain.inference_engine.http.engine import HttpEngine  # noqa: PLC0415

    return HttpEngine(spec, policy, inference, tokenizer, progress)
