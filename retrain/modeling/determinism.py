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
from retrain.modeling.policy import Policy

# Flash attention's backward pass shares long sequences out over the multiprocessors when there are too few of them to
# go round; adding those parts up in order is what costs. On an H200: 1 % at 4 × 4096 tokens, 45 % at 1 × 8192.
SHORT = 2048
BUSY = 0.9

# cuBLAS repeats itself across streams only with a workspace of a fixed size.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = "does not have a deterministic implementation"


class Determinism:
    """Runs training steps with deterministic kernels: always on a CPU, on a GPU as `[training] deterministic` says."""

    def __init__(self, wanted: Deterministic, policy: Policy, say: Callable[[str], None]) -> None:
        self.is_required = wanted is True
        self.is_on = policy.device.type == "cpu" or wanted is not False
        self.say = say
        self.least_sequences = 0.0
        """Fewer long ones than this are faster with kernels that do not repeat."""
        self.has_warned = False
        if self.is_on and policy.device.type == "cuda":
            heads = int(policy.causal_lm.config.get_text_config().num_attention_heads)
            self.least_sequences = BUSY * torch.cuda.get_device_properties(policy.device).multi_processor_count / heads
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            _fix_generated_kernels()

    @contextmanager
    def kernels(self, sequences: int, longest: int) -> Iterator[None]:
        """Deterministic kernels for a micro-batch, unless `auto` finds them too slow for it."""
        if not self.is_on or not (self.is_required or self._cost_little(sequences, longest)):
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

    def _cost_little(self, sequences: int, longest: int) -> bool:
        if longest <= SHORT or sequences >= self.least_sequences:
            return True
        if not self.has_warned:
            self.has_warned = True
            self.say(
                f"Note: {sequences} sequences of up to {longest} tokens at once are trained with faster kernels, whose "
                "last digits vary from run to run.  [training] deterministic = true repeats them, slower."
            )
        return False

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


def _fix_generated_kernels() -> None:
    """Let a layer be compiled to the same kernels in every process: they are otherwise chosen by timing them."""
    import torch._inductor.config as inductor  # noqa: PLC0415  (seconds, which only a GPU needs)

    inductor.deterministic = True


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
