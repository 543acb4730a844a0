"""The reference policy of the KL penalty: tensors that are swapped in for the trainable ones.

A fresh adapter changes nothing, so a copy of it restores the initial policy without a second model. In full
fine-tuning the reference is a frozen copy of the model, on the CPU if requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from retrain.backends.local.trainable import TrainableParams
from retrain.config.schema import Kl
from retrain.errors import BackendError
from retrain.modeling.policy import Policy


class Reference:
    """The initial policy, or one that is periodically mixed with the trained policy."""

    def __init__(self, policy: Policy, kl: Kl, offload: bool, trained: TrainableParams) -> None:
        self.trainable = trained
        self.kl = kl
        self.names = list(self.trainable.shards)
        self.parameters = list(self.trainable.shards.values())
        self.offloaded = offload and policy.device.type != "cpu"
        self.tensors = [self._keep(parameter.detach()) for parameter in self.parameters]

    def _keep(self, tensor: Tensor) -> Tensor:
        # Pinned memory copies to a GPU several times faster.
        return tensor.to("cpu", copy=True).pin_memory() if self.offloaded else tensor.clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the reference weights in, without gradients."""
        own = [parameter.data for parameter in self.parameters]
        try:
            for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
                parameter.data = tensor.to(parameter.device, non_blocking=True)
            with torch.no_grad():
                yield
        finally:
            for parameter, tensor in zip(self.parameters, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def maybe_sync(self, step: int) -> None:
        """Every `ref_model_sync_steps`: reference = alpha · policy + (1 - alpha) · reference."""
        if not self.kl.sync_ref_model or (step + 1) % self.kl.ref_model_sync_steps:
            return
        for tensor, parameter in zip(self.tensors, self.parameters, strict=True):
            mixed = tensor.float().lerp(parameter.detach().to(tensor.device).float(), self.kl.ref_model_mixup_alpha)
            tensor.copy_(mixed)

    def state(self) -> dict[str, Tensor]:
        """State for a resume: empty where the reference is the initial policy."""
        if not self.kl.sync_ref_model:
            return {}
        pairs = zip(self.names, self.tensors, strict=True)
        return {f"reference/{name}": self.trainable.gather(name, tensor).cpu() for name, tensor in pairs}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name in self.state():
            if name not in tensors:
                raise BackendError("the checkpoint has no reference; [kl] sync_ref_model was off when it was saved.")
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if f"reference/{name}" in tensors:
                tensor.copy_(self.trainable.shard(name, tensors[f"reference/{name}"]))
