"""FSDP2: decoder layers, their gradients and optimizer states are sharded over the ranks.

Embeddings, the last norm and the head are replicated: they run on slices of tokens, a different number of times per
rank, and a collective must be called the same number of times by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from retrain.backends.local.optimizer import MasterOptimizer
from retrain.backends.local.reference import Reference
from retrain.backends.local.totals import Totals
from retrain.backends.local.trainable import TrainableParams
from retrain.config import TrainConfig
from retrain.distributed.learner import RankedLearner
from retrain.errors import BackendError
from retrain.modeling.causal_lm import module_of
from retrain.modeling.packing import length_of
from retrain.modeling.policy import Policy
from retrain.modeling.transformers_internals import decoder_layers
from retrain.types import Datum

# Padding micro-batch without trainable tokens.
FILLER = Datum(
    prompt_ids=np.zeros(1, np.int64),
    completion_ids_T=np.zeros(1, np.int64),
    logprobs_T=np.zeros(1, np.float32),
    advantages_T=np.zeros(1),
    mask_T=np.zeros(1, bool),
)


def shard(policy: Policy, device: torch.device) -> Policy:
    """Shard the layers of a policy, which may have been loaded into CPU memory, and move the rest to the device."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    backbone = module_of(policy.causal_lm.base_model)
    layers = decoder_layers(backbone)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    in_float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=in_float32)
    replicated = {parameter for parameter in policy.adapted.parameters() if parameter not in inside}
    for tensor in (*replicated, *policy.adapted.buffers()):
        tensor.data = tensor.data.to(device)
    fully_shard(backbone, mesh=mesh, ignored_params=replicated & set(backbone.parameters()))
    for module in (*layers, backbone):
        assert isinstance(module, FSDPModule)
        # Gradients are summed: the loss is already divided by the size of the global step.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return replace(policy, device=device)


class Shards(TrainableParams):
    """This rank's shard of each trainable parameter."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        # Views: the optimizer updates the sharded parameters through them.
        self.shards = {
            name: nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p
            for name, p in self.parameters.items()
        }

    def gather(self, name: str, shard: Tensor) -> Tensor:
        """The full tensor from the shards of all ranks; every rank must call this."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor) or not shard.ndim:
            return shard
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        own = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
        return own.full_tensor()

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor) or not full.ndim:
            return full
        return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


class ShardedOptimizer(MasterOptimizer):
    """AdamW on this rank's shards."""

    @property
    def replicated(self) -> list[nn.Parameter]:
        """Masters of replicated parameters."""
        pairs = zip(self.masters, self.trainable.parameters.values(), strict=True)
        return [master for master, parameter in pairs if not isinstance(parameter, DTensor)]

    def clear(self) -> None:
        """Drop all gradients."""
        super().clear()
        for parameter in self.trainable.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Collect the gradients that were reduce-scattered to this rank."""
        for parameter, part in zip(self.trainable.parameters.values(), self.parameters, strict=True):
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                fresh = parameter.grad.to_local()
                part.grad = fresh if part.grad is None else part.grad + fresh
                parameter.grad = None
        super().gather()

    def norm(self) -> Tensor:
        """The gradient norm over all shards; replicated parameters count once."""
        replicated = {id(master) for master in self.replicated}
        squares = torch.zeros(2, dtype=torch.float32, device=self.masters[0].device)
        for master in self.masters:
            if master.grad is not None:
                squares[int(id(master) in replicated)] += master.grad.square().sum()
        sharded = squares[:1].clone()
        dist.all_reduce(sharded)
        return (sharded[0] + squares[1]).sqrt()


class ShardedReference(Reference):
    """Shards of the reference. Values are copied in, since FSDP owns the sharded storage."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the reference weights in for the duration of the context."""
        own = [part.detach().clone() for part in self.parameters]
        try:
            self._put(self.tensors)
            with torch.no_grad():
                yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(self.parameters, tensors, strict=True):
            part.copy_(tensor)


class ShardedLearner(RankedLearner):
    """A Learner over sharded layers. Passes are collectives: every rank must run the same number, whatever its share.

    `mirror` is a full policy to sample from and save, where needed.
    """

    is_replicated = False
    make_trainable = Shards
    make_optimizer = ShardedOptimizer
    make_reference = ShardedReference

    def __init__(self, policy: Policy, config: TrainConfig, log: Callable[[str], None], mirror: Policy | None) -> None:
        super().__init__(policy, config, log)
        self.mirror = mirror

    def warm_up(self, ways: set[str]) -> None:
        """Does nothing: ranks would warm up at different times, and each pass waits for all of them."""

    def replicated(self) -> list[nn.Parameter]:
        """Masters of replicated parameters."""
        assert isinstance(self.optimizer, ShardedOptimizer)
        return self.optimizer.replicated

    def gathered_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter by name, gathered one by one; every rank must iterate over all of them."""
        for name, shard in self.trainable.shards.items():
            yield name, self.trainable.gather(name, shard.detach())

    @torch.no_grad()
    def gathered_policy(self) -> Policy | None:
        """Gather the trainable weights into the mirror; every rank must call this."""
        own = dict(self.mirror.adapted.named_parameters()) if self.mirror is not None else {}
        for name, full in self.gathered_params():
            if own:
                own[name].copy_(full)
        return self.mirror

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Micro-batches, padded to the largest count of any rank."""
        batches = super().split(datums)
        most = torch.tensor(len(batches), device=self.policy.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*batches, *([FILLER] for _ in range(int(most) - len(batches)))]

    def _backward_within_memory(self, datums: Sequence[Datum], divisor: float) -> Totals:
        """Accumulate gradients. A rank that runs out of memory cannot retry, since the others wait for it."""
        self.memory.prepare(max((length_of(datum) for datum in datums), default=0))
        try:
            return self._backward(self.split(datums), divisor)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self.policy.device} ran out of memory with micro-batches of {self.memory.micro_batch_tokens} "
                "tokens.  Try: a smaller [memory] micro_batch_tokens, or gradient_checkpointing = true"
            ) from error

    def save(self, path: Path) -> None:
        """Gather everything; rank 0 writes what a single process would."""
        policy, state = self.gathered_policy(), self.state()
        if dist.get_rank() == 0:
            assert policy is not None
            policy.save_adapter(path / "adapter")
            save_file(state, str(path / "learner.safetensors"))
