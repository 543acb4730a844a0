"""The reference policy of the KL penalty: tensors that stand in for those that learn.

A fresh adapter changes nothing, so a copy of it makes the model what it was: no second model is needed. A model that is
trained as a whole is kept as a frozen copy, on the CPU if asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from retrain.backends.local.trained import Trained
from retrain.config.schema import Kl
from retrain.errors import BackendError
from retrain.modeling.policy import Policy


class Reference:
    """The policy as it was at the start, or as it follows the one that learns."""

    def __init__(self, policy: Policy, kl: Kl, offload: bool, trained: Trained) -> None:
        self.trained = trained
        self.kl = kl
        self.names = list(self.trained.parts)
        self.learning = list(self.trained.parts.values())
        self.offloaded = offload and policy.device.type != "cpu"
        self.tensors = [self._keep(parameter.detach()) for parameter in self.learning]

    def _keep(self, tensor: Tensor) -> Tensor:
        # Pinned memory is copied to a GPU several times as fast.
        return tensor.to("cpu", copy=True).pin_memory() if self.offloaded else tensor.clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the policy be the reference for a while; nothing is computed with gradients meanwhile."""
        own = [parameter.data for parameter in self.learning]
        try:
            for parameter, tensor in zip(self.learning, self.tensors, strict=True):
                parameter.data = tensor.to(parameter.device, non_blocking=True)
            with torch.no_grad():
                yield
        finally:
            for parameter, tensor in zip(self.learning, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After a step that calls for it: reference = alpha · policy + (1 - alpha) · reference."""
        if not self.kl.sync_ref_model or (step + 1) % self.kl.ref_model_sync_steps:
            return
        for tensor, parameter in zip(self.tensors, self.learning, strict=True):
            mixed = tensor.float().lerp(parameter.detach().to(tensor.device).float(), self.kl.ref_model_mixup_alpha)
            tensor.copy_(mixed)

    def state(self) -> dict[str, Tensor]:
        """What a resume needs: nothing where the reference is the start, which loading the model gives again."""
        if not self.kl.sync_ref_model:
            return {}
        pairs = zip(self.names, self.tensors, strict=True)
        return {f"reference/{name}": self.trained.whole(name, tensor).cpu() for name, tensor in pairs}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for name in self.state():
            if name not in tensors:
                raise BackendError("the checkpoint holds no reference; [kl] sync_ref_model was off when it was saved.")
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if f"reference/{name}" in tensors:
                tensor.copy_(self.trained.part(name, tensors[f"reference/{name}"]))
