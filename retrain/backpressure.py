"""Back pressure: who decides the next step's batch size."""

from __future__ import annotations

from typing import Any, Protocol

from retrain.types import StepMetrics


class BackPressure(Protocol):
    """Watches steps and recommends a batch size."""

    def observe(self, metrics: StepMetrics) -> None:
        """A step took this long over this many completions."""
        ...

    def recommend(self, batch_size: int) -> int:
        """The batch size of the next step."""
        ...

    def metrics(self) -> StepMetrics:
        """What it thinks, for the logs."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All of its memory, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that memory."""
        ...


class NoBackPressure:
    """Keeps the batch size that the configuration asks for."""

    def observe(self, metrics: StepMetrics) -> None:
        """Nothing to learn."""

    def recommend(self, batch_size: int) -> int:
        """The same again."""
        return batch_size

    def metrics(self) -> StepMetrics:
        """The keys every run logs, empty."""
        numbers = ("p_star", "sigma", "kappa", "utilization", "throughput")
        return {"bp_action": "off", "bp_regime": "off", **{f"bp_{name}": None for name in numbers}}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
