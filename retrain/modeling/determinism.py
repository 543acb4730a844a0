"""Bitwise reproducible training steps.

A sum changes its last bits with its order. Our own gathers sum gradients in a fixed order; for everything else, such as
the backward pass of flash attention, PyTorch's deterministic kernels are used.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.config.schema import Deterministic
from retrain.errors import BackendError
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import embedding_backward, use_deterministic_compilation
from retrain.modeling.transformers_internals import decoder_layers

# `auto` does without deterministic kernels where they would cost more than this share of a micro-batch.
MAX_COST = 0.05
# Speed of flash attention relative to matrix products, measured on an H200.
ATTENTION_SPEED = 0.4
# More programs than this per multiprocessor keep all of them busy until the end.
MANY_PROGRAMS = 8

# cuBLAS is deterministic across streams only with a workspace of fixed size.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = "does not have a deterministic implementation"


class Determinism:
    """Runs training steps with deterministic kernels: always on a CPU, on a GPU by `[training] deterministic`."""

    def __init__(self, wanted: Deterministic, policy: Policy, log: Callable[[str], None]) -> None:
        self.is_required = wanted is True
        self.is_on = policy.device.type == "cpu" or wanted is not False
        self.log = log
        self.has_warned = False
        settings = policy.causal_lm.config.get_text_config()
        self.heads = int(settings.num_attention_heads)
        self.width = self.heads * int(settings.to_dict().get("head_dim") or settings.hidden_size // self.heads)
        """Width of the attention output, over all heads."""
        layers = decoder_layers(policy.adapted)
        self.layer_size = sum(p.numel() for layer in layers for p in layer.parameters()) / policy.layers
        self.processors = 0
        """Multiprocessors of the GPU; 0 on a CPU."""
        if self.is_on and policy.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(policy.device).multi_processor_count
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            use_deterministic_compilation()

    def kernels(self, is_wanted: bool = True) -> ExitStack:
        """Use deterministic kernels until the stack is closed, if this run does.

        A run that samples in another thread keeps it open: compiled layers are compiled anew, and differently, when
        PyTorch's setting changes.
        """
        stack = ExitStack()
        if self.is_on and is_wanted:
            deterministic = torch.utils.deterministic
            stack.callback(setattr, deterministic, "fill_uninitialized_memory", deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
            stack.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True)
            deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return stack

    def cost(self, lengths: Sequence[int]) -> float:
        """How much longer a micro-batch takes with deterministic kernels, as a share of its time."""
        pairs = sum(length * length for length in lengths)
        # Both in units of matrix products: forward and backward pass, which takes 2.5 times as long for attention.
        attention, products = 2 * pairs * self.width / ATTENTION_SPEED, 4 * self.layer_size * sum(lengths)
        slower = flash_backward_slowdown(lengths, self.heads, self.processors) - 1
        return slower * 2.5 * attention / (products + 3.5 * attention)

    def includes_attention(self, lengths: Sequence[int]) -> bool:
        """Whether attention over these sequences is deterministic as well, or `auto` considers that too slow."""
        if self.is_required or not self.processors or self.cost(lengths) <= MAX_COST:
            return True
        if not self.has_warned:
            self.has_warned = True
            self.log(
                f"Note: {len(lengths)} sequences of up to {max(lengths)} tokens are trained with faster kernels, whose "
                "last digits vary from run to run.  [training] deterministic = true avoids that, but is slower."
            )
        return False

    def disable_after(self, error: RuntimeError) -> None:
        """Continue without deterministic kernels if an operation has none; re-raises any other error."""
        # With ours off already, the setting is someone else's, such as a loss plugin's: trying again would not help.
        if not self.is_on or not lacks_deterministic_kernel(error):
            raise error
        if self.is_required:
            raise BackendError(
                f"[training] deterministic = true is not possible: {error}  "
                'Try: deterministic = "auto", which continues without deterministic kernels'
            ) from error
        self.is_on = False
        self.log(f"Warning: this run is not bitwise reproducible: {str(error).split('.')[0]}.")


def lacks_deterministic_kernel(error: BaseException) -> bool:
    """Whether PyTorch has raised this because an operation has no deterministic kernel."""
    return isinstance(error, RuntimeError) and _NO_KERNEL in str(error)


def flash_backward_slowdown(lengths: Sequence[int], heads: int, processors: int) -> float:
    """How much longer the backward pass of flash attention takes if it is deterministic.

    It then has one program per head of a sequence, or a few where that leaves multiprocessors idle. Their time grows
    with the square of the length, so all others may wait for the longest sequence.
    """
    programs = len(lengths) * heads
    if programs > MANY_PROGRAMS * processors:
        return 1.0
    each = -(-processors // programs)
    busy_until = [0.0] * processors
    for length in sorted(lengths, reverse=True):
        for _ in range(heads * each):
            heapq.heapreplace(busy_until, busy_until[0] + length * length / each)
    return max(busy_until) * processors / (heads * sum(length * length for length in lengths))


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` for a (rows, width) tensor, with gradients of repeated rows summed in a fixed order.

    Plain indexing, and `index_select` on a GPU, sum them in nondeterministic order.
    """
    return F.embedding(index, rows)


def sum_by_row(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum the (values, width) of each of `rows` rows in a fixed order."""
    return embedding_backward(values, index, rows)
