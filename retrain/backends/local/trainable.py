"""The trainable parameters, and how they are saved."""

from __future__ import annotations

from torch import Tensor

from retrain.modeling.policy import Policy


class TrainableParams:
    """The trainable parameters by name. Here each is complete; sharded processes hold a shard of each."""

    def __init__(self, policy: Policy) -> None:
        self.parameters = {name: p for name, p in policy.adapted.named_parameters() if p.requires_grad}
        self.shards = self.parameters
        """What this process holds of each parameter."""

    def gather(self, name: str, shard: Tensor) -> Tensor:
        """The full tensor, shaped like the parameter, from this process's shard and those of the others."""
        return shard

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This process's shard of a full tensor."""
        return full
