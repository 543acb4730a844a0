"""AdamW on what learns, in float32 whatever the model computes in.

A bf16 weight cannot take a step much smaller than itself, so the optimiser keeps float32 masters and the weights that
learn are their rounding. Where these are float32 already, they are their own masters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from retrain.backends.local.trained import Trained
from retrain.config import TrainConfig
from retrain.modeling.policy import Policy


class MasterOptimizer:
    """Gathers gradients over micro-batches, then moves the weights that learn."""

    def __init__(self, policy: Policy, config: TrainConfig, trained: Trained) -> None:
        self.trained = trained
        self.names = list(self.trained.parts)
        self.learning: list[nn.Parameter] = list(self.trained.parts.values())
        self.own_masters = self.learning[0].dtype != torch.float32
        self.masters = (
            [nn.Parameter(p.detach().float().clone()) for p in self.learning] if self.own_masters else self.learning
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
        """What the first step will allocate for moments."""
        return 0 if self.adam.state else 2 * sum(master.nbytes for master in self.masters)

    def norm(self) -> Tensor:
        """That of all gradients together."""
        return torch.nn.utils.get_total_norm([master.grad for master in self.masters if master.grad is not None])

    def clear(self) -> None:
        """Forget gradients."""
        for parameter in (*self.learning, *self.masters):
            parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Add a micro-batch's gradients up in float32."""
        if not self.own_masters:
            return
        pairs = [(p, m) for p, m in zip(self.learning, self.masters, strict=True) if p.grad is not None]
        # Hundreds of small matrices: one launch for many of them instead of one each.
        fresh = [torch.empty_like(master) for _, master in pairs]
        torch._foreach_copy_(fresh, [p.grad for p, _ in pairs if p.grad is not None])
        known = [(m.grad, gradient) for (_, m), gradient in zip(pairs, fresh, strict=True) if m.grad is not None]
        if known:
            torch._foreach_add_([held for held, _ in known], [gradient for _, gradient in known])
        for (parameter, master), gradient in zip(pairs, fresh, strict=True):
            parameter.grad = None
            if master.grad is None:
                master.grad = gradient

    @torch.no_grad()
    def step(self, lr: float) -> float | None:
        """Clip and move; returns the norm before clipping, or None when it is not finite and nothing moved."""
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
        """Let the weights be their masters' rounding."""
        if self.own_masters:
            torch._foreach_copy_(tuple(self.learning), tuple(self.masters))

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, on the CPU."""
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"parameter/{name}"] = self.trained.whole(name, master.data).cpu()
            for key, value in self.adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = self.trained.whole(name, value).cpu()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave, to the bit."""
        held: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition("/")
            held[name][key] = self.trained.part(name, tensor)
        self.adam.state.clear()
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(held[name].pop("parameter"))
            # Plain AdamW keeps its step counter on the CPU; the fused one wants it beside the moments.
            self.adam.state[master] = {
                key: value if key == "step" and not self.fused else value.to(master.device)
                for key, value in held[name].items()
            }
        self.round()
