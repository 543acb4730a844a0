"""Compiled decoder layers: norms, rotary embeddings, activations and adapters fused, attention left alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.modeling.policy import Policy
from retrain.types import Datum

# Two sizes, so that the number of tokens is known to vary, and large enough for kernels that suit real batches.
WARM_UP_TOKENS = (1536, 2304)
WARM_UP_LENGTH = 256


def compile_layers(causal_lm: Any) -> None:
    """Compile every decoder layer in place. They share their code, so all of them compile as one.

    The first shape is compiled as it is, which is quick; the second one that comes makes its sizes symbolic, once and
    for all. What was compiled is kept for the next run.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/retrain/inductor").expanduser()))
    # A model with several kinds of layer, trained and checked in several modes, needs more variants than the default 8.
    torch._dynamo.config.recompile_limit = 64
    kinds = set(causal_lm._no_split_modules or ())
    for module in causal_lm.modules():
        # Runs that share a model ask for this more than once; compiling anew would forget what was compiled.
        if type(module).__name__ in kinds and module._compiled_call_impl is None:
            module.compile()


def datums_for_warm_up(policy: Policy, tokens: int) -> list[Datum]:
    """Sequences of so many tokens in all, worth nothing."""
    length = min(WARM_UP_LENGTH, policy.context_length)
    ids = np.arange(length) % policy.vocabulary
    prompt, completion = ids[: length // 2], ids[length // 2 :]
    zeros = np.zeros(len(completion), dtype=np.float32)
    datum = Datum(prompt, completion, zeros, zeros, np.ones(len(completion), dtype=bool))
    return [datum] * (tokens // length)
