"""Compiles decoder layers: fuses norms, rotary embeddings, activations and adapters; attention is excluded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from retrain.modeling.causal_lm import CausalLM, module_of
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import is_compiled, raise_recompile_limit
from retrain.modeling.transformers_internals import compilable_layers
from retrain.types import Datum

# Two sizes, so that the number of tokens is dynamic; large enough for kernels that suit real batches.
WARM_UP_TOKENS = (1536, 2304)
WARM_UP_LENGTH = 256


def compile_layers(causal_lm: CausalLM) -> None:
    """Compile every decoder layer in place. They share their code and therefore compile once.

    The first shape is compiled statically, the second makes sizes dynamic. The cache is kept for later runs.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/retrain/inductor").expanduser()))
    raise_recompile_limit()
    for layer in compilable_layers(module_of(causal_lm)):
        # Runs that share a model call this repeatedly; compiling again would discard the result.
        if not is_compiled(layer):
            layer.compile()


def datums_for_warm_up(policy: Policy, tokens: int) -> list[Datum]:
    """Datums with `tokens` tokens in total and zero advantages."""
    length = min(WARM_UP_LENGTH, policy.context_length)
    ids = np.arange(length) % policy.vocabulary
    prompt, completion = ids[: length // 2], ids[length // 2 :]
    zeros = np.zeros(len(completion), dtype=np.float32)
    datum = Datum(prompt, completion, zeros, zeros, np.ones(len(completion), dtype=bool))
    return [datum] * (tokens // length)
