"""Advantages of recorded rollouts recomputed with another method, without sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.advantages import CreditAssigner
from retrain.advantages.sepa import SEPAController
from retrain.assemble import build_planning
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.tokens import load_tokenizer, vocabulary_texts
from retrain.planning.masks import PlanningMasks
from retrain.rollout import Rollouts
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

    def __init__(self, config: TrainConfig, texts: Sequence[str]) -> None:
        self.credit = CreditAssigner(config)
        self.masks: PlanningMasks = build_planning(config, texts)
        self.sepa = SEPAController(config.sepa)

    def advantages(self, step: int, groups: Sequence[Group], masks: list[list[BoolArray]]) -> FloatArray:
        """Token advantages of a step, concatenated."""
        self.sepa.observe_correct_rate(Rollouts(list(groups), 0.0, 0.0).correct_rate)
        credit = self.credit.assign(groups, masks, self.sepa.resolve_lambda(step))
        self.sepa.update(credit.exec_entropy_var)
        return np.concatenate([tokens for group in credit.token_advantages_PG for tokens in group])


def replay(log_dir: Path, recorded: TrainConfig, wanted: TrainConfig) -> Iterator[Difference]:
    """Compare two methods step by step over the recordings of a run."""
    if not find_recordings(log_dir):
        raise ConfigError(f"{log_dir} has no recorded rollouts.  Try: run it with [training] record = true")
    texts = vocabulary_texts(load_tokenizer(recorded.model.model))
    before, after = Method(recorded, texts), Method(wanted, texts)
    for step, groups in read_recordings(log_dir):
        masks = after.masks.of(groups)
        planning = np.concatenate([mask for group in masks for mask in group])
        old = before.advantages(step, groups, before.masks.of(groups))
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
