"""AdamW on the trainable parameters, in float32 whatever the model's precision.

bf16 weights lose updates much smaller than themselves, so the optimizer keeps float32 master weights and rounds them
into the model. float32 parameters are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retrain.backends.local.trainable import TrainableParams
from retrain.config import TrainConfig
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import foreach_add_, foreach_copy_


class MasterOptimizer:
    """Accumulates gradients over micro-batches, then updates the trainable weights."""

    def __init__(self, policy: Policy, config: TrainConfig, trained: TrainableParams) -> None:
        self.trainable = trained
        self.names = list(self.trainable.shards)
        self.parameters: list[nn.Parameter] = list(self.trainable.shards.values())
        self.has_masters = self.parameters[0].dtype != torch.float32
        self.masters = (
            [nn.Parameter(p.detach().float().clone()) for p in self.parameters] if self.has_masters else self.parameters
        )
        self.grad_clip = config.loss.grad_clip or math.inf
        self.fused = policy.device.type == "cuda"
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.training.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.training.weight_decay,
            fused=self.fused,
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes that the first step will allocate for Adam moments."""
        return 0 if self.adam.state else 2 * sum(master.nbytes for master in self.masters)

    def norm(self) -> Tensor:
        """The global gradient norm."""
        return torch.nn.utils.get_total_norm([master.grad for master in self.masters if master.grad is not None])

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def take(self) -> list[Tensor | None]:
        """Take out the gradients accumulated so far, in the order of the masters."""
        gradients = [master.grad for master in self.masters]
        self.clear()
        return gradients

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Add what `take` returned, times a factor."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            if gradient is not None:
                master.grad = gradient * factor if master.grad is None else master.grad.add_(gradient, alpha=factor)

    @torch.no_grad()
    def gather(self) -> None:
        """Add a micro-batch's gradients in float32."""
        if not self.has_masters:
            return
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p.grad is not None]
        # Hundreds of small matrices: one kernel launch for many of them.
        fresh = [torch.empty_like(master) for _, master in pairs]
        foreach_copy_(fresh, [p.grad for p, _ in pairs if p.grad is not None])
        known = [(m.grad, gradient) for (_, m), gradient in zip(pairs, fresh, strict=True) if m.grad is not None]
        if known:
            foreach_add_([held for held, _ in known], [gradient for _, gradient in known])
        for (parameter, master), gradient in zip(pairs, fresh, strict=True):
            parameter.grad = None
            if master.grad is None:
                master.grad = gradient

    @torch.no_grad()
    def step(self, lr: float) -> float | None:
        """Clip and update; returns the norm before clipping, or None if it is not finite and the update was skipped."""
        total = self.norm()
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.grad_clip, total)
        norm = float(total)
        finite = math.isfinite(norm)
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            self.round()
        self.clear()
        return norm if finite else None

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into the model's weights."""
        if self.has_masters:
            foreach_copy_(self.parameters, self.masters)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, on the CPU."""
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"parameter/{name}"] = self.trainable.gather(name, master.data).cpu()
            for key, value in self.adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = self.trainable.gather(name, value).cpu()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, bit for bit."""
        held: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition("/")
            held[name][key] = self.trainable.shard(name, tensor)
        self.adam.state.clear()
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(held[name].pop("parameter"))
            # Plain AdamW keeps its step counter on the CPU, the fused one on the device.
            self.adam.state[master] = {
                key: value if key == "step" and not self.fused else value.to(master.device)
                for key, value in held[name].items()
            }
        self.round()
