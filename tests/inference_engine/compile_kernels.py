"""Compile every launch of our kernels for GPUs that are not here: `python compile_kernels.py 80 90`.

Triton compiles without a GPU; only a launch needs one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from retrain.inference_engine.pytorch import kernels, small_batch
from retrain.inference_engine.pytorch.cache import FP8
from retrain.inference_engine.pytorch.launching import CAPABILITY
from retrain.inference_engine.pytorch.paged import Group, PagedCache
from retrain.modeling import logprob_kernels
from retrain.modeling.attention import Scoring
from tests.inference_engine.kernel_checks import slots_for

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
compiled: set[tuple[Any, ...]] = set()


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if int(value) >= 2**31 else "i32"  # type: ignore[call-overload]


def compile_launch(kernel: Any, *args: Any, **options: Any) -> None:
    """In place of a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in options.items() if k in kernel.arg_names
    }
    constants = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    case = (kernel.fn.__name__, tuple(signature.items()), tuple(constants.items()))
    if case in compiled:
        return
    compiled.add(case)
    flags = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    # 8-bit floats need Ada or newer.
    least = 89 if POINTERS[FP8] in signature.values() else 0
    for capability in filter(lambda given: given >= least, map(int, sys.argv[1:])):
        own = {"OVERLAPS": divmod(capability, 10) >= CAPABILITY} if "OVERLAPS" in constants else {}
        values = {(kernel.arg_names.index(name),): value for name, value in (constants | own).items()}
        code = compile(ASTSource(kernel, signature, values), GPUTarget("cuda", capability, 32), options=flags).asm
        assert code["cubin"] and ("griddepcontrol" in code["ptx"]) == any(own.values())


def launch_attention(heads: int, size: int, splits: int, cache_dtype: torch.dtype, scoring: Scoring) -> None:
    """Eight key heads, as Qwen3 and Llama have them."""
    cache = PagedCache(2, 8, 128, cache_dtype, torch.device("cpu"))
    tokens = torch.zeros(1, 8, 100, size, dtype=torch.bfloat16)
    cache.fill(0, (tokens, tokens), cache.place([Group(100, [0, 1])]))
    query, new = torch.zeros(2, heads, 1, size, dtype=torch.bfloat16), torch.zeros(2, 8, 1, size, dtype=torch.bfloat16)
    lengths = torch.tensor([100, 100], dtype=torch.int32)
    kernels.decode_attention(query, (new, new), cache.layers[0], cache.table, lengths, scoring, splits)


if __name__ == "__main__":
    JITFunction.run = compile_launch
    plain = Scoring(0.1, None, None)
    for splits in (1, 8):
        launch_attention(32, 128, splits, torch.bfloat16, plain)
    for cache_dtype in (FP8, torch.int8):
        launch_attention(32, 128, 8, cache_dtype, plain)
    launch_attention(8, 64, 8, torch.bfloat16, plain)
    launch_attention(16, 256, 8, torch.bfloat16, Scoring(0.1, 1024, 30.0))
    kernels.draw_tokens(torch.zeros(2, 151_936), slots_for(2, 4, "cpu", 0.7, stops=(7, 11)), torch.tensor([0, 1]))
    for outputs, width in ((19456, 2560), (6144, 2560), (2560, 9728)):
        for rows in (8, 32):
            inputs, weight = (torch.zeros(size, width, dtype=torch.bfloat16) for size in (rows, outputs))
            small_batch.multiply(inputs, weight, None, torch.zeros(small_batch.FEW_TILES, dtype=torch.int32))
    logits, targets = torch.zeros(2, 151_936, dtype=torch.bfloat16), torch.tensor([1, 2])
    _, normalizers = logprob_kernels.normalize(logits, targets, 0.7)
    for gradient in (None, normalizers):
        logprob_kernels.differentiate(logits, targets, normalizers, 0.7, gradient)
    print(f"{len(compiled)} launches compiled")
