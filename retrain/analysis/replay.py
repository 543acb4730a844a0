"""Advantages of recorded rollouts recomputed with another method, without sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.advantages import CreditAssigner
from retrain.advantages.sepa import SEPAController
from retrain.analysis.change import Row
from retrain.analysis.runs import read_rows
from retrain.assemble import build_planning
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.tokens import load_tokenizer, vocabulary_texts
from retrain.planning.masks import PlanningMasks
from retrain.rollout import Rollouts
from retrain.storage.logs import MANIFEST, METRICS
from retrain.storage.recording import find_recordings, read_recordings
from retrain.types import BoolArray, FloatArray, Group


@dataclass(frozen=True)
class Difference:
    """How the token advantages of two methods differ in one step."""

    step: int
    tokens: int
    mean_before: float
    mean_after: float
    """Mean absolute advantage per token."""
    changed: float
    """Mean absolute difference between the two."""
    sign_flips: int
    planning_before: float
    planning_after: float
    """Share of absolute advantage on planning tokens."""


class Method:
    """The credit assignment of one configuration, with the state of its SEPA schedule."""

    def __init__(self, config: TrainConfig, texts: Sequence[str], log: Mapping[int, Row]) -> None:
        self.credit = CreditAssigner(config)
        self.masks: PlanningMasks = build_planning(config, texts)
        self.sepa = SEPAController(config.sepa)
        self.unseen = dict(log)
        """Logged steps that the schedule has not observed yet."""

    def advantages(
        self, step: int, groups: Sequence[Group], masks: list[list[BoolArray]], sepa_lambda: float | None = None
    ) -> FloatArray:
        """Token advantages of a step, concatenated; `sepa_lambda` replaces that of the schedule."""
        self._catch_up(step)
        self.sepa.observe_correct_rate(Rollouts(list(groups), 0.0, 0.0).correct_rate)
        scheduled = self.sepa.resolve_lambda(step)
        credit = self.credit.assign(groups, masks, scheduled if sepa_lambda is None else sepa_lambda)
        self.sepa.update(credit.exec_entropy_var)
        return np.concatenate([tokens for group in credit.token_advantages_PG for tokens in group])

    def _catch_up(self, step: int) -> None:
        """Observe the steps before this one that were not recorded, from their metrics."""
        earlier = [before for before in self.unseen if before < step]
        for row in (self.unseen.pop(before) for before in earlier):
            self.sepa.observe_correct_rate(row.get("correct_rate"))
            self.sepa.update(row.get("exec_entropy_var"))
        self.unseen.pop(step, None)


def read_lambda(log: Mapping[int, Row], step: int) -> float | None:
    """The SEPA lambda that the run used in a step; None if it was not logged."""
    value = log.get(step, {}).get("sepa_lambda")
    return float(value) if isinstance(value, int | float) else None


def replay(log_dir: Path, recorded: TrainConfig, wanted: TrainConfig) -> Iterator[Difference]:
    """Compare two methods step by step over the recordings of a run."""
    if (log_dir / MANIFEST).is_file():
        runs = sorted(str(path) for path in (log_dir / "runs").glob("*"))
        hint = runs[0] if runs else "one of its runs"
        raise ConfigError(f"{log_dir} is a campaign; recordings are in its runs.  Try: retrain replay {hint}")
    if not find_recordings(log_dir):
        hint = "Try: run it with --record, or [training] record = true"
        raise ConfigError(f"{log_dir} has no recorded rollouts.  {hint}")
    texts = vocabulary_texts(load_tokenizer(recorded.model.model))
    log, _ = read_rows(log_dir / METRICS)
    before, after = Method(recorded, texts, log), Method(wanted, texts, log)
    for step, groups in read_recordings(log_dir):
        masks = after.masks.of(groups)
        planning = np.concatenate([mask for group in masks for mask in group])
        old = before.advantages(step, groups, before.masks.of(groups), read_lambda(log, step))
        new = after.advantages(step, groups, masks)
        yield Difference(
            step=step,
            tokens=len(old),
            mean_before=float(np.abs(old).mean()) if len(old) else 0.0,
            mean_after=float(np.abs(new).mean()) if len(new) else 0.0,
            changed=float(np.abs(new - old).mean()) if len(old) else 0.0,
            sign_flips=int((np.sign(old) * np.sign(new) < 0).sum()),
            planning_before=_share(old, planning),
            planning_after=_share(new, planning),
        )


def _share(advantages: FloatArray, planning: BoolArray) -> float:
    total = float(np.abs(advantages).sum())
    return float(np.abs(advantages[planning]).sum()) / total if total else 0.0
