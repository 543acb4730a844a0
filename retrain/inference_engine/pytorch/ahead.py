"""Compiles the kernels of a decode step in threads, while the main thread compiles the layers.

Triton mostly runs native code and processes of its own, so the threads hardly slow it down. What a model needs is read
from its configuration; a kernel that it needs in another form is compiled when it is first launched, as without this.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from retrain.capacity.memory import Shape, read_shape
from retrain.capacity.sampling import BLOCK, SMALLEST
from retrain.inference_engine.pytorch.cache import Placement
from retrain.inference_engine.pytorch.decode_step import PROGRAMS, DecodeAttention, Kernels
from retrain.inference_engine.pytorch.paged import SCRATCH, PagedCache
from retrain.inference_engine.pytorch.products import Part, Product
from retrain.inference_engine.pytorch.slots import Slots
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.attention import Scoring

# Products are compiled once for up to 16 rows, and once for more.
PRODUCT_ROWS = (16, 32)


def compile_ahead(model: SamplingModel, kernels: Kernels, cache: torch.dtype) -> list[Future[None]]:
    """Launch every kernel once on empty inputs. No CUDA graph may be captured before all are done."""
    shape = read_shape(model.policy.causal_lm.config.get_text_config().to_dict())
    tasks: list[Callable[[], object]] = [lambda: _draw(model, kernels)]
    tasks += [lambda rows=rows: _multiply(model, rows) for rows in PRODUCT_ROWS]  # type: ignore[misc]
    if shape is not None:
        # Small batches split their sequences, large ones do not.
        sizes = (SMALLEST, max(SMALLEST, PROGRAMS // shape.key_heads))
        tasks += [lambda rows=rows: _attend(model, kernels, cache, shape, rows) for rows in sizes]  # type: ignore[misc]
    threads = ThreadPoolExecutor(len(tasks), "retrain-kernels")
    futures = [threads.submit(_run, task, model.policy.device) for task in tasks]
    threads.shutdown(wait=False)
    return futures


def _run(task: Callable[[], object], device: torch.device) -> None:
    # Every thread has its own device and mode.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        task()


def _draw(model: SamplingModel, kernels: Kernels) -> None:
    policy = model.policy
    slots = Slots(SMALLEST, 1, policy.stop_ids, 0, policy.device)
    logits = torch.zeros(SMALLEST, policy.vocabulary, dtype=policy.dtype, device=policy.device)
    kernels.draw_tokens(logits, slots, slots.everyone)


def _multiply(model: SamplingModel, rows: int) -> None:
    products = [part.product for part in model.causal_lm.modules() if isinstance(part, Part)]
    for product in {product.weight.shape: product for product in products if type(product) is Product}.values():
        product.compute(product.weight.new_zeros(rows, product.weight.shape[1]))


def _attend(model: SamplingModel, kernels: Kernels, dtype: torch.dtype, shape: Shape, rows: int) -> None:
    device = model.policy.device
    size = shape.keys // shape.key_heads
    cache = PagedCache(rows, 1, BLOCK, dtype, device)
    query, key = (
        torch.zeros(1, rows, width // size, size, dtype=model.dtype, device=device).transpose(1, 2)
        for width in (shape.queries, shape.keys)
    )
    scratch = torch.tensor([SCRATCH], device=device)
    cache.fill(0, (key[:, :, :1], key[:, :, :1]), Placement(scratch, scratch))
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    DecodeAttention(kernels, cache, lengths, rows).attend(0, query, key, key, Scoring(size**-0.5))
