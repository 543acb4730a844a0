"""What makes a training step repeat to the bit: deterministic kernels, and sizes that a resume takes over.

A sum whose order changes from run to run changes its last bits. Our own gathers add up gradients in a fixed order; for
everything else, such as the backward pass of flash attention, PyTorch is asked for its deterministic kernels.
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

# cuBLAS repeats itself across streams only with a workspace of a fixed size.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = "does not have a deterministic implementation"


class Determinism:
    """Runs training steps with deterministic kernels: always on a CPU, on a GPU as `[training] deterministic` says."""

    def __init__(self, wanted: Deterministic, device: torch.device, say: Callable[[str], None]) -> None:
        self.is_required = wanted is True
        self.is_on = device.type == "cpu" or wanted is not False
        self.say = say
        if self.is_on and device.type == "cuda":
            import torch._inductor.config as inductor  # noqa: PLC0415  (seconds, which only a GPU needs)

            os.environ.setdefault(_WORKSPACE, ":4096:8")
            # Generated kernels are otherwise chosen by timing them, and two choices round differently.
            inductor.deterministic = True

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Deterministic kernels for everything that runs inside."""
        if not self.is_on:
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

    def give_up(self, error: RuntimeError) -> None:
        """Continue without deterministic kernels where an operation has none; any other error is raised again."""
        if _NO_KERNEL not in str(error):
            raise error
        if self.is_required:
            raise BackendError(
                f"[training] deterministic = true cannot be kept: {error}  "
                'Try: deterministic = "auto", which continues without'
            ) from error
        self.is_on = False
        self.say(f"Warning: this run will not repeat to the bit: {str(error).split('.')[0]}.")


def _warns_only() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` for a (rows, width) tensor, with gradients of repeated rows added up in a fixed order.

    Plain indexing adds them in the order in which threads come by, and `index_select` does so on a GPU.
    """
    return F.embedding(index, rows)


def sum_by_row(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Add up the (values, width) that belong to each of `rows` rows, in a fixed order."""
    return torch.ops.aten.embedding_dense_backward(values, index, rows, -1, False)  # type: ignore[no-any-return]
