"""The overlapped step: complete groups are trained on while the rest of the step is still being sampled.

The weights change only when the step is complete, so every group is sampled from the same policy, and the gradient is
the same sum as in a sequential step. A group's credit is assigned as soon as it is scored; the backend gets parts of a
fixed number of groups and sums their gradients in the order of the parts, whatever order they arrive in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from retrain.advantages import CreditAssigner
from retrain.backends import Backend, OverlappingBackend
from retrain.config import TrainConfig
from retrain.datums import build_datums
from retrain.errors import ConfigError, RetrainError
from retrain.planning.masks import PlanningMasks
from retrain.rollout import DeliverGroup
from retrain.types import BoolArray, Datum, Group, Obstacle

# Parts of a step. More of them leave less work for the end of a step, and have smaller micro-batches.
PARTS = 8


@dataclass
class Taken:
    """What is known of the groups that were taken early, by the group's `id`."""

    masks: dict[int, list[BoolArray]] = field(default_factory=dict)
    datums: dict[int, list[Datum]] = field(default_factory=dict)


class StepOverlap(Protocol):
    """What the loop needs for overlapped steps."""

    taken: Taken

    def begin(self, sepa_lambda: float | None) -> DeliverGroup | None:
        """Begin a step; returns what takes its groups early. None for a sequential step.

        `sepa_lambda` is None if it depends on the rewards of the step.
        """

    def discard(self) -> None:
        """Discard the step: it will not be trained on."""


class Sequential:
    """Every step is sampled completely before it is trained on."""

    def __init__(self) -> None:
        self.taken = Taken()

    def begin(self, sepa_lambda: float | None) -> None:
        """Does nothing: no part is taken early."""

    def discard(self) -> None:
        """Does nothing."""


class Overlapped:
    """Assigns credit to groups as they arrive and passes them to the backend."""

    def __init__(
        self, backend: OverlappingBackend, credit: CreditAssigner, planning: PlanningMasks | None, config: TrainConfig
    ) -> None:
        self.backend, self.credit, self.planning = backend, credit, planning
        self.all_groups = config.kl.beta > 0
        self.part_size = math.ceil(config.training.batch_size / PARTS)
        self.lock = threading.Lock()
        self.begin(None)

    def begin(self, sepa_lambda: float | None) -> DeliverGroup | None:
        """Begin a step."""
        self.sepa_lambda = sepa_lambda or 0.0
        self.taken = Taken()
        self.parts: dict[int, dict[int, list[Datum]]] = {}
        """For each part that has begun, the rows of its groups by the group's number."""
        return None if sepa_lambda is None else self.take

    def take(self, at: int, group: Group) -> None:
        """Assign credit to group number `at`; with the last group of its part, the part is trained on."""
        with self.lock:
            try:
                masks = self.planning.of([group]) if self.planning else None
                credit = self.credit.assign([group], masks, self.sepa_lambda)
            except RetrainError:
                # The complete step is assigned credit later; the same error is then raised with the group's number.
                return
            if masks:
                self.taken.masks[id(group)] = masks[0]
            self.taken.datums[id(group)] = build_datums([group], credit, self.all_groups)
            part = self.parts.setdefault(at // self.part_size, {})
            part[at] = self.taken.datums[id(group)]
            if len(part) == self.part_size:
                rows = [datum for number in sorted(part) for datum in part[number]]
                self.backend.accumulate(at // self.part_size, rows)

    def discard(self) -> None:
        """Drop the gradients of the step."""
        self.backend.discard_parts()


def choose_overlap(
    config: TrainConfig,
    backend: Backend,
    credit: CreditAssigner,
    planning: PlanningMasks | None,
    log: Callable[[str], None],
) -> StepOverlap:
    """Overlapped steps where `[training] overlap` allows them; the choice and its reason are printed."""
    wanted = config.training.overlap
    if wanted is False:
        return Sequential()
    obstacle = find_obstacle(config, backend, credit)
    if wanted is True and obstacle is not None and obstacle.is_final:
        raise ConfigError(
            f"[training] overlap = true is not possible: {obstacle.reason}.  "
            'Try: overlap = "auto", which falls back to sequential steps'
        )
    if obstacle is None or wanted is True:
        assert isinstance(backend, OverlappingBackend)
        log("Steps are overlapped: groups are trained on while others are still being sampled.")
        return Overlapped(backend, credit, planning, config)
    if config.backend.backend == "local":
        hint = "" if obstacle.is_final else " ([training] overlap = true overlaps them)"
        log(f"Steps are sequential: {obstacle.reason}{hint}.")
    return Sequential()


def find_obstacle(config: TrainConfig, backend: Backend, credit: CreditAssigner) -> Obstacle | None:
    """Why steps are sequential; a final reason first."""
    if not isinstance(backend, OverlappingBackend):
        return Obstacle("this backend trains on complete steps", is_final=True)
    found = [backend.overlap_obstacle(), credit.overlap_obstacle()]
    if config.teaching.enabled:
        found.append(Obstacle("[teaching] scores the teaching texts of a step together", is_final=True))
    return min(filter(None, found), key=lambda obstacle: not obstacle.is_final, default=None)
