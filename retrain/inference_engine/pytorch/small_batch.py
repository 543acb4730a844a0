"""Matrix products of a few rows, as decoding a small batch needs them: bound by reading the weights.

cuBLAS splits such products and adds the parts in a second kernel. Here the last program of a tile adds them, always in
the same order. On an H200 the products of a Qwen3-4B layer take 6 µs less for 8 rows; for 64 rows or more, cuBLAS is as
fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from retrain.inference_engine.pytorch.launching import await_inputs, launch_options

MAX_ROWS = 32
# Minimum of a matrix instruction: rows are padded to it.
MIN_ROWS = 16
# Weight rows per program.
TILE = 64
# Fewer tiles than this leave multiprocessors idle: their sums are split.
FEW_TILES = 96
MANY_TILES = 256
# Hopper and data-center Blackwell: the tiles in flight take more shared memory than other GPUs have.
GENERATIONS = (9, 10)


@triton.jit
def _store(output, at, total, bias, n, outputs, is_inside, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_inside)


# One kernel for all numbers of rows, whether or not a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    inputs, weight, bias, output, partial, arrived, rows, outputs, width, inputs_row,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * TILE + tl.arange(0, TILE)
    m = tl.arange(0, ROWS)
    per_split = width // SPLITS
    k = split * per_split + tl.arange(0, BLOCK)
    weight_at = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    inputs_at = inputs + m[:, None] * inputs_row + k[None, :]
    is_output = (n < outputs)[:, None]
    is_row = (m < rows)[:, None]
    total = tl.zeros((TILE, ROWS), tl.float32)
    for _ in range(0, per_split, BLOCK):
        # The weights are the left factor: their tile is large enough for Hopper's matrix instruction.
        a = tl.load(weight_at, mask=is_output, other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs_at, mask=is_row, other=0.0)
        total = tl.dot(a, tl.trans(b), total)
        weight_at += BLOCK
        inputs_at += BLOCK

    at = m[None, :] * outputs + n[:, None]
    is_inside = is_output & (m < rows)[None, :]
    if SPLITS == 1:
        _store(output, at, total, bias, n, outputs, is_inside, HAS_BIAS)
    else:
        size = rows * outputs
        tl.store(partial + split * size + at, total, mask=is_inside)
        # All threads have stored before one of them announces it.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((TILE, ROWS), tl.float32)
            for part in range(SPLITS):
                # From the L2 cache: other multiprocessors have written it.
                total += tl.load(partial + part * size + at, mask=is_inside, other=0.0, cache_modifier=".cg")
            _store(output, at, total, bias, n, outputs, is_inside, HAS_BIAS)
            tl.store(arrived + tile, 0)


def plan(outputs: int, width: int) -> tuple[int, int, int] | None:
    """Inputs per iteration, splits and pipeline stages for an (outputs, width) matrix; None if no division is even."""
    tiles = triton.cdiv(outputs, TILE)
    block, splits, stages = (128, 1, 3) if tiles >= MANY_TILES else (256, 1 if tiles >= FEW_TILES else 2, 4)
    return None if width % (block * splits) else (block, splits, stages)


def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """inputs · weightᵀ + bias of at most MAX_ROWS rows; `arrived` has a zero for each tile, before and after."""
    rows, (outputs, width) = len(inputs), weight.shape
    planned = plan(outputs, width)
    assert planned is not None, "as `takes` has checked"
    block, splits, stages = planned
    output = torch.empty(rows, outputs, dtype=inputs.dtype, device=inputs.device)
    partial = torch.empty(splits * rows * outputs if splits > 1 else 1, dtype=torch.float32, device=inputs.device)
    _multiply[(triton.cdiv(outputs, TILE), splits)](
        inputs, weight, weight if bias is None else bias, output, partial, arrived, rows, outputs, width,
        inputs.stride(0), ROWS=max(MIN_ROWS, triton.next_power_of_2(rows)), TILE=TILE, BLOCK=block, SPLITS=splits,
        HAS_BIAS=bias is not None, num_warps=4, num_stages=stages, **launch_options(inputs.device),
    )  # fmt: skip
    return output


def takes(weight: Tensor) -> bool:
    """Whether the kernel multiplies with this matrix on its GPU."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return False
    if torch.cuda.get_device_capability(weight.device)[0] not in GENERATIONS or plan(*weight.shape) is None:
        return False
    # Here, since a tensor allocated while a graph is being captured belongs to that graph.
    if weight.device not in _arrived:
        _arrived[weight.device] = torch.zeros(FEW_TILES, dtype=torch.int32, device=weight.device)
    return True


_arrived: dict[torch.device, Tensor] = {}
"""Counters that every launch leaves at zero; launches follow one another."""


# A custom operator: compiled code then does not depend on the number of rows.
@torch.library.custom_op("retrain::linear", mutates_args=())
def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs · weightᵀ + bias: a few rows by the kernel, many by cuBLAS. `takes` has accepted the matrix."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    is_small = len(flat) <= MAX_ROWS
    # Flat: a product of three dimensions may run as many small ones.
    output = multiply(flat, weight, bias, _arrived[weight.device]) if is_small else F.linear(flat, weight, bias)
    return output.view(*inputs.shape[:-1], -1)


@linear.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
