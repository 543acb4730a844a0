"""Bitwise reproducible training steps.

A sum changes its last bits with its order. Our own gathers sum gradients in a fixed order; for everything else, such as
the backward pass of flash attention, PyTorch's deterministic kernels are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.config.schema import Deterministic
from retrain.errors import BackendError
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import embedding_backward, use_deterministic_compilation

# With few long sequences the backward pass of flash attention splits them over the multiprocessors; summing the parts
# in order is what costs. On an H200: 1% at 4 × 4096 tokens, 45% at 1 × 8192.
SHORT = 2048
BUSY = 0.9

# cuBLAS is deterministic across streams only with a workspace of fixed size.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = "does not have a deterministic implementation"


class Determinism:
    """Runs training steps with deterministic kernels: always on a CPU, on a GPU by `[training] deterministic`."""

    def __init__(self, wanted: Deterministic, policy: Policy, log: Callable[[str], None]) -> None:
        self.is_required = wanted is True
        self.is_on = policy.device.type == "cpu" or wanted is not False
        self.log = log
        self.min_sequences = 0.0
        """Below this number of long sequences, deterministic kernels are too slow for `auto`."""
        self.has_warned = False
        if self.is_on and policy.device.type == "cuda":
            heads = int(policy.causal_lm.config.get_text_config().num_attention_heads)
            self.min_sequences = BUSY * torch.cuda.get_device_properties(policy.device).multi_processor_count / heads
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            use_deterministic_compilation()

    @contextmanager
    def kernels(self, sequences: int, longest: int) -> Iterator[None]:
        """Use deterministic kernels for a micro-batch, unless `auto` considers them too slow."""
        if not self.is_on or not (self.is_required or self._are_cheap(sequences, longest)):
            yield
            return
        was_on, was_warning = torch.are_deterministic_algorithms_enabled(), _warns_only()
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

    def _are_cheap(self, sequences: int, longest: int) -> bool:
        if longest <= SHORT or sequences >= self.min_sequences:
            return True
        if not self.has_warned:
            self.has_warned = True
            self.log(
                f"Note: {sequences} sequences of up to {longest} tokens at once are trained with faster kernels, whose "
                "last digits vary from run to run.  [training] deterministic = true avoids that, but is slower."
            )
        return False

    def disable_after(self, error: RuntimeError) -> None:
        """Continue without deterministic kernels if an operation has none; re-raises any other error."""
        if _NO_KERNEL not in str(error):
            raise error
        if self.is_required:
            raise BackendError(
                f"[training] deterministic = true is not possible: {error}  "
                'Try: deterministic = "auto", which continues without'
            ) from error
        self.is_on = False
        self.log(f"Warning: this run is not bitwise reproducible: {str(error).split('.')[0]}.")


def _warns_only() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` for a (rows, width) tensor, with gradients of repeated rows summed in a fixed order.

    Plain indexing, and `index_select` on a GPU, sum them in nondeterministic order.
    """
    return F.embedding(index, rows)


def sum_by_row(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum the (values, width) of each of `rows` rows in a fixed order."""
    return embedding_backward(values, index, rows)
