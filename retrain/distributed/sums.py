"""Sums over the ranks: gradients in float32, in an order that depends on nothing but the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Elements added up in one go: large enough to fill the wire, small beside the model.
BUCKET = 1 << 25


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks; one that no rank has stays absent.

    The optimiser skips a parameter without gradient, an expert that no token went to, and must do so on every rank.
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
        torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def in_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, up to `BUCKET` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def agree_on(tensors: Sequence[Tensor]) -> None:
    """Give every rank rank 0's values."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
