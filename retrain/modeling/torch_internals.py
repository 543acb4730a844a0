"""Private PyTorch APIs: every use of one is in this module.

Tested with torch 2.11 (GPU) and 2.13 (CPU). Where a version lacks one, there is a fallback or an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrain.errors import BackendError

TESTED = "2.13.0"
RECOMPILE_LIMIT = 64
CUDNN_9 = 90_000


def _check() -> None:
    """Raise an error that says so where this version lacks an operator. Here once, since calls may be compiled."""
    for namespace, name in (
        (torch.ops.aten, "_flash_attention_forward"),
        (torch.ops.aten, "_flash_attention_backward"),
        (torch.ops.aten, "embedding_dense_backward"),
        (torch, "_scaled_mm"),
        (torch, "_foreach_copy_"),
        (torch, "_foreach_add_"),
    ):
        try:
            getattr(namespace, name)
        except AttributeError as error:
            raise BackendError(
                f"torch {torch.__version__} has no {name}, which retrain needs.  Try: pip install torch=={TESTED}"
            ) from error


_check()


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors with few kernel launches."""
    torch._foreach_copy_(tuple(targets), tuple(sources))


def foreach_add_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add many tensors in place with few kernel launches."""
    torch._foreach_add_(tuple(targets), tuple(sources))


@contextmanager
def any_order() -> Iterator[None]:
    """Let kernels sum in any order, whatever the setting; `torch.use_deterministic_algorithms` takes longer."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=was_warning)


class FlashAttention:
    """Causal flash attention over (tokens, heads, size) sequences of unequal lengths.

    Queries are aligned with the end of their keys. `ends` and `longest` are those of queries and keys; `window` is -1
    for full attention.
    """

    def __init__(self, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float, window: int) -> None:
        self.sequences = (*ends, *longest)
        self.options = {"scale": scale, "window_size_left": window, "window_size_right": 0}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the log-sum-exp of the scores: (heads, tokens)."""
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, *self.sequences, 0.0, True, False, **self.options
        )
        return found[0], found[1]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, output, logsumexp, *self.sequences, 0.0, True, no_dropout, no_dropout,
            **self.options,
        )  # fmt: skip
        return gradients


def has_cudnn_attention() -> bool:
    """Whether cuDNN's attention is available; flash attention is the fallback."""
    try:
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: B018  (absent in some builds)
    except AttributeError:
        return False
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version is not None and version >= CUDNN_9


class CudnnAttention:
    """Causal attention over one (tokens, heads, size) sequence by cuDNN.

    Its kernels for sequences of unequal lengths are not used: PyTorch plans them anew in every call, which takes longer
    than the attention, and with torch 2.11 their gradients were wrong.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the log-sum-exp of the scores: (heads, tokens)."""
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(part.transpose(0, 1)[None] for part in (query, key, value)), None, True, 0.0, True, False,
            scale=self.scale,
        )  # fmt: skip
        return found[0][0].transpose(0, 1), found[1][0, :, :, 0]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(part.transpose(0, 1)[None] for part in (gradient, query, key, value, output)),
            logsumexp[None, :, :, None], no_dropout, no_dropout, None, None, None, len(query), len(key), 0.0, True,
            scale=self.scale,
        )  # fmt: skip
        dq, dk, dv = (part[0].transpose(0, 1) for part in found)
        return dq, dk, dv


def embedding_backward(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum the (values, width) of each of `rows` rows in a fixed order."""
    summed: Tensor = torch.ops.aten.embedding_dense_backward(values, index, rows, -1, False)
    return summed


def scaled_fp8_product(inputs: Tensor, weight: Tensor, input_scales: Tensor, weight_scales: Tensor) -> Tensor:
    """inputs · weightᵀ of fp8 matrices with scales per row, as bf16."""
    outputs: Tensor = torch._scaled_mm(
        inputs, weight.t(), scale_a=input_scales[:, None], scale_b=weight_scales[None, :], out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    return outputs


def has_packed_linear() -> bool:
    """Whether oneDNN's packed matrix products are available; plain ones are the fallback."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise  # noqa: B018  (absent in some builds)
    except AttributeError:
        return False
    return True


def pack_matrix(weight: Tensor) -> Tensor:
    """A copy of an (outputs, inputs) matrix in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def packed_linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """inputs · weightᵀ + bias, with a matrix from `pack_matrix`."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    output: Tensor = torch.ops.mkldnn._linear_pointwise(flat, packed, bias, "none", [], "")
    return output.view(*inputs.shape[:-1], -1)


def cpu_computes_bf16() -> bool:
    """Whether this CPU has bf16 products; assumed where PyTorch cannot tell."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:
        return True


def raise_recompile_limit() -> None:
    """Several kinds of layers in several modes need more compiled variants than the default 8."""
    # Versions that lack the setting keep their default: more layers run uncompiled.
    with suppress(AttributeError):
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


@contextmanager
def compiled_with(module: nn.Module, backend: str) -> Iterator[None]:
    """Compile a module with another backend inside the context; what was compiled before is kept."""
    kept = module._compiled_call_impl
    module.compile(backend=backend)
    try:
        yield
    finally:
        module._compiled_call_impl = kept


@contextmanager
def varying(module: nn.Module, dimension: int) -> Iterator[None]:
    """Tell the compiler, in calls of a compiled module, that this dimension of every tensor argument varies."""
    kept = module._compiled_call_impl
    assert kept is not None

    def call(*arguments: object, **more: object) -> object:
        for tensor in tree_leaves((arguments, more)):
            if isinstance(tensor, Tensor) and tensor.dim() > dimension:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return kept(*arguments, **more)

    module._compiled_call_impl = call
    try:
        yield
    finally:
        module._compiled_call_impl = kept


def start_compile_workers() -> None:
    """Start the processes that compile kernels, and Triton's driver; both otherwise start with the first kernel."""
    # Versions that lack it start them later; a broken compiler is reported where it is used.
    with suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415  (takes seconds)
        from torch.utils._triton import triton_hash_with_backend  # noqa: PLC0415  (for a GPU only)

        AsyncCompile.warm_pool()
        # Builds the driver and hashes Triton's sources, once per process.
        triton_hash_with_backend()


def early_launch() -> dict[str, bool]:
    """Compiler options that launch a kernel while the previous one still runs."""
    import torch._inductor.config as inductor  # noqa: PLC0415  (takes seconds, needed on a GPU only)

    try:
        inductor.triton.enable_pdl  # noqa: B018  (absent in some versions)
    except AttributeError:
        return {}
    return {"triton.enable_pdl": True}


def use_deterministic_compilation() -> None:
    """Compile to the same kernels in every process; they are otherwise chosen by timing."""
    import torch._inductor.config as inductor  # noqa: PLC0415  (takes seconds, needed on a GPU only)

    # Versions that lack the setting choose by timing.
    with suppress(AttributeError):
        inductor.deterministic = True
