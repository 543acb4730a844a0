"""Compiles decoder layers: fuses norms, rotary embeddings, activations and adapters; attention is an operator."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from retrain.modeling.causal_lm import CausalLM, module_of
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import (
    compiled_with,
    early_launch,
    is_compiled,
    raise_recompile_limit,
    start_compile_workers,
    varying,
)
from retrain.modeling.transformers_internals import compilable_layers
from retrain.modeling.triton_internals import build_launchers_quickly
from retrain.types import Datum

# Two sizes, so that the number of tokens is dynamic; the second is large enough for kernels that suit real batches.
WARM_UP_TOKENS = (1536, 2304)
WARM_UP_LENGTH = 256
# The dimension of a layer's inputs that counts tokens: a batch is packed into one row.
TOKENS = 1


def start_compiler() -> None:
    """Import the compiler and start its processes in the background; weights are loaded meanwhile."""
    _keep_cache()
    # The default, one per CPU core, would leave no core for this process while they start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    threading.Thread(target=_prepare, name="retrain-compiler", daemon=True).start()


def _prepare() -> None:
    build_launchers_quickly()
    start_compile_workers()


def _keep_cache() -> None:
    """Keep what is compiled for later runs; the default is a temporary folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/retrain/inductor").expanduser()))


def compile_layers(causal_lm: CausalLM, is_sampled: bool = False) -> None:
    """Compile every decoder layer in place. They share their code and therefore compile once.

    Those that are sampled from launch their short kernels early; see `launching` of the engine.

    Without `varying_tokens`, the first shape is taken as fixed; a second one shows which sizes are dynamic, and
    everything is compiled again. See `traced_only`.
    """
    _keep_cache()
    raise_recompile_limit()
    options = early_launch() if is_sampled else {}
    for layer in compilable_layers(module_of(causal_lm)):
        # Runs that share a model call this repeatedly; compiling again would discard the result.
        if not is_compiled(layer):
            layer.compile(options=options or None)


@contextmanager
def varying_tokens(causal_lm: CausalLM) -> Iterator[None]:
    """Tell the compiler that the number of tokens varies, while it sees its first batch.

    Not for layers with graph breaks: the tensors that enter the rest of a layer are not known here.
    """
    with ExitStack() as stack:
        for layer in compilable_layers(module_of(causal_lm)):
            if is_compiled(layer):
                stack.enter_context(varying(layer, TOKENS))
        yield


@contextmanager
def traced_only(causal_lm: CausalLM) -> Iterator[None]:
    """Trace compiled layers without generating kernels.

    Shows the compiler a first shape at a fraction of the time that it takes to compile it.
    """
    with ExitStack() as stack:
        for layer in compilable_layers(module_of(causal_lm)):
            if is_compiled(layer):
                stack.enter_context(compiled_with(layer, "eager"))
        yield


def datums_for_warm_up(policy: Policy, tokens: int) -> list[Datum]:
    """Datums with `tokens` tokens in total and zero advantages."""
    length = min(WARM_UP_LENGTH, policy.context_length)
    ids = np.arange(length) % policy.vocabulary
    prompt, completion = ids[: length // 2], ids[length // 2 :]
    zeros = np.zeros(len(completion), dtype=np.float32)
    datum = Datum(prompt, completion, zeros, zeros, np.ones(len(completion), dtype=bool))
    return [datum] * (tokens // length)
