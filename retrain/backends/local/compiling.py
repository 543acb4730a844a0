"""Compiled decoder layers: norms, rotary embeddings, activations and adapters fused, attention left alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


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
