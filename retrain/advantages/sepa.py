"""The SEPA schedule: how strongly the uncertainty of execution tokens is pooled at each step.

The pooling is `retrain.advantages.token.sepa_pool`; this module chooses lambda.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from retrain.advantages.method import TransformSpec
from retrain.errors import CheckpointError
from retrain.plugins import REGISTRIES, is_plugin
from retrain.runtime.text import plural
from retrain.types import FloatArray

if TYPE_CHECKING:
    from retrain.config.schema import Sepa, TrainConfig

EMA_DECAY = 0.99
WARMUP_BATCHES = 50
"""Batches before the average is frozen as the reference variance."""
VARIANCE_LEFT = 0.2
"""`auto` starts to pool below this share of the reference variance, and pools fully at 0."""


class SEPAController:
    """Chooses lambda from the step, the decay of uncertainty variance (auto) and a gate on correctness.

    linear: `clamp((step - delay_steps) / steps, 0, 1)`.
    auto: the larger of that and `1 - min(ema / v0 / 0.2, 1)`, where `ema` averages the variance of execution-token
    uncertainty and `v0` is its value after 50 batches.
    Lambda is 0 until the correct rate of a batch reaches the gate, which then stays open.
    """

    def __init__(self, config: Sepa) -> None:
        self.config = config
        self.gate_open = config.correct_rate_gate <= 0.0
        self._observed = 0
        self._ema: float | None = None
        self._initial: float | None = None

    def observe_correct_rate(self, rate: float | None) -> None:
        """Open the gate once the correct rate of a batch reaches it; None, where nothing was scored, is ignored."""
        self.gate_open = self.gate_open or (rate is not None and rate >= self.config.correct_rate_gate)

    def update(self, execution: FloatArray | float | None) -> None:
        """Observe the uncertainties of a batch's execution tokens, or their variance; None or no tokens are ignored."""
        variance = _variance(execution)
        if variance is None:
            return
        self._ema = variance if self._ema is None else EMA_DECAY * self._ema + (1.0 - EMA_DECAY) * variance
        self._observed += 1
        if self._observed == WARMUP_BATCHES:
            self._initial = self._ema

    def resolve_lambda(self, step: int) -> float:
        """The lambda of this step, between 0 (no pooling) and 1 (all execution tokens equal)."""
        return self._ungated_lambda(step) if self.gate_open else 0.0

    def known_lambda(self, step: int) -> float | None:
        """The lambda of this step before its rewards are known; None if they decide, by opening the gate."""
        if self.gate_open or self._ungated_lambda(step) == 0.0:
            return self.resolve_lambda(step)
        return None

    def state_dict(self) -> dict[str, float | int | bool | None]:
        """State for a resume."""
        return {
            "gate_open": self.gate_open,
            "observed": self._observed,
            "ema": self._ema,
            "initial": self._initial,
        }

    def load_state_dict(self, state: Mapping[str, float | int | bool | None]) -> None:
        """Restore what `state_dict` returned."""
        try:
            observed = state["observed"]
            gate_open, ema, initial = state["gate_open"], state["ema"], state["initial"]
        except KeyError as error:
            raise CheckpointError(f"the SEPA state of the checkpoint has no {error.args[0]!r}.") from error
        if observed is None:
            raise CheckpointError("the SEPA state of the checkpoint has no number of observed batches.")
        self.gate_open = bool(gate_open)
        self._observed = int(observed)
        self._ema = None if ema is None else float(ema)
        self._initial = None if initial is None else float(initial)

    def _ungated_lambda(self, step: int) -> float:
        linear = self._linear_lambda(step)
        return max(self._auto_lambda(), linear) if self.config.schedule == "auto" else linear

    def _linear_lambda(self, step: int) -> float:
        since = step - self.config.delay_steps
        if self.config.steps <= 0:
            return 1.0 if since >= 0 else 0.0
        return min(max(since / self.config.steps, 0.0), 1.0)

    def _auto_lambda(self) -> float:
        # Without initial variance there is no decay to follow and nothing to pool.
        if self._ema is None or self._initial is None or self._initial <= 0.0:
            return 0.0
        return 1.0 - min(self._ema / self._initial / VARIANCE_LEFT, 1.0)


def _variance(execution: FloatArray | float | None) -> float | None:
    if execution is None:
        return None
    if isinstance(execution, float | int):
        variance = float(execution)
    else:
        values = np.asarray(execution, dtype=np.float64)
        if values.size == 0:
            return None
        variance = float(values.var())
    if not math.isfinite(variance) or variance < 0.0:
        raise ValueError(f"the variance of execution-token uncertainty is {variance}, which is not a valid variance.")
    return variance


def why_off(sepa: Sepa, steps: int) -> str:
    """Why SEPA has no effect on a run with this many steps, or ""."""
    # At step `delay_steps`, counted from 0, lambda is still 0.
    if sepa.schedule != "linear" or steps - 1 > sepa.delay_steps:
        return ""
    delay = f"[sepa] delay_steps = {sepa.delay_steps}"
    return f"SEPA stays off: it begins after {delay}, and this run has {plural(steps, 'step')}."


def find_idle_sepa(config: TrainConfig) -> str:
    """The same for a configuration: "" for methods without SEPA, and for plugins, which only a run loads."""
    algorithm, training = config.algorithm, config.training
    if algorithm.algorithm_mode or is_plugin("transform", algorithm.transform_mode) or training.epochs:
        return ""
    transform = REGISTRIES["transform"].load(algorithm.transform_mode)
    assert isinstance(transform, TransformSpec)
    return why_off(config.sepa, training.max_steps) if transform.uses_sepa_controller else ""
