"""Engines that sample on a server: one client, and a table for each kind of server."""

from typing import Any

from retrain.config.schema import Inference
from retrain.inference_engine import InferenceEngine, Progress
from retrain.inference_engine.http.wire import MLX, OPENAI, SGLANG, VLLM, Wire

__all__ = ["mlx", "openai", "sglang", "vllm"]


def vllm(policy: Any, inference: Inference, tokenizer: Any, progress: Progress) -> InferenceEngine:
    """Over vLLM servers."""
    return _engine(VLLM, policy, inference, tokenizer, progress)


def sglang(policy: Any, inference: Inference, tokenizer: Any, progress: Progress) -> InferenceEngine:
    """Over SGLang servers."""
    return _engine(SGLANG, policy, inference, tokenizer, progress)


def mlx(policy: Any, inference: Inference, tokenizer: Any, progress: Progress) -> InferenceEngine:
    """Over servers of mlx-lm."""
    return _engine(MLX, policy, inference, tokenizer, progress)


def openai(policy: Any, inference: Inference, tokenizer: Any, progress: Progress) -> InferenceEngine:
    """Over servers that speak as vLLM does."""
    return _engine(OPENAI, policy, inference, tokenizer, progress)


def _engine(wire: Wire, policy: Any, inference: Inference, tokenizer: Any, progress: Progress) -> InferenceEngine:
    # `retrain doctor` reads the tables alone, and PyTorch takes seconds to import.
    from retrain.inference_engine.http.engine import HttpEngine  # noqa: PLC0415

    return HttpEngine(wire, policy, inference, tokenizer, progress)
