"""How closely the engine's log-probs must match the trainer's, by their precisions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from retrain.checks.agreement import DRIFT, EIGHT_BITS, FLOAT32, HALF, Agreement, Tolerance
from retrain.config import TrainConfig
from retrain.inference_engine import InferenceEngine, Measured, Remote
from retrain.modeling.policy import Policy

# Mean log-prob difference of a server at the start of a run: above these it does not compute in float32, or bf16.
EXACT, ROUGH = 1e-3, 0.03


def make_agreement(
    config: TrainConfig, policy: Policy, engine: InferenceEngine, log: Callable[[str], None]
) -> Agreement:
    """The check of a run's rows."""
    return Agreement(find_tolerance(config, policy, engine).at(config.training.temperature), log)


def find_tolerance(config: TrainConfig, policy: Policy, engine: InferenceEngine) -> Tolerance:
    """The tolerance for the coarser precision of the two. A server's is inferred from its mismatch at the start."""
    if config.lora.dropout:
        return DRIFT
    is_exact = policy.dtype == torch.float32
    if isinstance(engine, Measured):
        if engine.mismatch_at_start > ROUGH:
            return EIGHT_BITS
        return FLOAT32 if is_exact and engine.mismatch_at_start < EXACT else HALF
    inference = config.inference
    if isinstance(engine, Remote) or inference.engine != "pytorch":
        return HALF
    precisions = {inference.dtype, inference.kv_cache_dtype}
    if precisions & {"fp8", "fp4", "int8"}:
        return EIGHT_BITS
    return FLOAT32 if is_exact and precisions == {"auto"} else HALF
