"""Collectives over the ranks. Gradients are summed in float32, in an order that depends only on the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retrain.modeling.torch_internals import foreach_copy_

# Elements per bucket: large enough to saturate the network, small compared with the model.
BUCKET = 1 << 25


def all_reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks; a gradient that no rank has stays None.

    The optimizer skips parameters without a gradient (an expert without tokens) and must do so on every rank.
    """
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    shared = [parameter for parameter, has in zip(parameters, present.tolist(), strict=True) if has]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in in_buckets([parameter.grad for parameter in shared if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def in_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors in buckets of up to `BUCKET` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's values to every rank."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
