"""Engines that sample on a server: one client, and a table for each kind of server."""

from functools import partial

from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.wire import MLX, OPENAI, SGLANG, VLLM

__all__ = ["HttpEngine", "mlx", "openai", "sglang", "vllm"]

vllm = partial(HttpEngine, VLLM)
sglang = partial(HttpEngine, SGLANG)
mlx = partial(HttpEngine, MLX)
openai = partial(HttpEngine, OPENAI)
