"""FSDP2: the decoder layers lie sharded over the ranks, gradients and optimiser with them.

Embeddings, the last norm and the head stay whole on every rank: their matrix is used a slice of tokens at a time, as
often as a rank has tokens for, and a collective must be called equally often by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.backends.local.optimizer import MasterOptimizer
from retrain.backends.local.reference import Reference
from retrain.backends.local.trained import Trained
from retrain.distributed.even import EvenLearner
from retrain.modeling.policy import Policy


def shard(policy: Policy, device: torch.device) -> Policy:
    """Shard the layers of a policy, which may have been loaded into main memory, and move the rest to the device."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    backbone = policy.causal_lm.base_model
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    in_float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=in_float32)
    whole = {parameter for parameter in policy.adapted.parameters() if parameter not in inside}
    for tensor in (*whole, *policy.adapted.buffers()):
        tensor.data = tensor.data.to(device)
    fully_shard(backbone, mesh=mesh, ignored_params=whole & set(backbone.parameters()))
    for module in (*layers, backbone):
        assert isinstance(module, FSDPModule)
        # Gradients are sums: the loss is divided by the size of the whole step already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return replace(policy, device=device)


class Shards(Trained):
    """This rank's part of each parameter that learns, and how parts become a whole."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        # Views: what the optimiser writes into one is in the sharded parameter.
        self.parts = {
            name: nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p
            for name, p in self.parameters.items()
        }

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All ranks' parts of something shaped like a parameter; every rank must call this."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor) or not part.ndim:
            return part
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        own = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
        return own.full_tensor()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor) or not whole.ndim:
            return whole
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


class ShardedOptimizer(MasterOptimizer):
    """AdamW on this rank's parts."""

    @property
    def common(self) -> list[nn.Parameter]:
        """Masters of parameters that every rank holds as a whole."""
        pairs = zip(self.masters, self.trained.parameters.values(), strict=True)
        return [master for master, parameter in pairs if not isinstance(parameter, DTensor)]

    def clear(self) -> None:
        """Forget gradients."""
        super().clear()
        for parameter in self.trained.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Take the gradients that were scattered to this rank."""
        for parameter, part in zip(self.trained.parameters.values(), self.learning, strict=True):
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                fresh = parameter.grad.to_local()
                part.grad = fresh if part.grad is None else part.grad + fresh
                parameter.grad = None
        super().gather()

    def norm(self) -> Tensor:
        """Over all parts, those that every rank holds counted once."""
        common = {id(master) for master in self.common}
        squares = torch.zeros(2, dtype=torch.float32, device=self.masters[0].device)
        for master in self.masters:
            if master.grad is not None:
                squares[int(id(master) in common)] += master.grad.square().sum()
        sharded = squares[:1].clone()
        dist.all_reduce(sharded)
        return (sharded[0] + squares[1]).sqrt()


class ShardedReference(Reference):
    """The reference's parts. Their values take the policy's place, since the sharded storage itself is FSDP's."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the policy be the reference for a while."""
        own = [part.detach().clone() for part in self.learning]
        try:
            self._put(self.tensors)
            with torch.no_grad():
                yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(self.learning, tensors, strict=True):
            part.copy_(tensor)


class ShardedLearner(EvenLearner):
    """A Learner over sharded layers."""

    make_trained = Shards
    make_optimizer = ShardedOptimizer
    make_reference = ShardedReference

    def common(self) -> list[nn.Parameter]:
        """Masters that every rank holds alike."""
        assert isinstance(self.optimizer, ShardedOptimizer)
        return self.optimizer.common

    def wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that learns, gathered one by one."""
        for name, part in self.trained.parts.items():
            yield name, self.trained.whole(name, part.detach())
