"""The parameters that learn, and how they are saved."""

from __future__ import annotations

from torch import Size, Tensor

from retrain.modeling.policy import Policy


class Trained:
    """What learns, by name. Here every parameter is whole; processes that shard them have parts."""

    def __init__(self, policy: Policy) -> None:
        self.parameters = {name: p for name, p in policy.adapted.named_parameters() if p.requires_grad}
        self.parts = self.parameters
        """What this process holds of each."""

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All of something shaped like a parameter, given this process's part of it."""
        return part

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of it."""
        return whole

    @property
    def shapes(self) -> dict[str, Size]:
        """The shape of each whole."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}
