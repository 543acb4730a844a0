"""Which groups an overlapped step gives to the backend, and when steps are sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from retrain.advantages import CreditAssigner
from retrain.advantages.method import TransformSpec
from retrain.advantages.token import sepa_pool
from retrain.advantages.uncertainty import UncertaintyContext
from retrain.config import TrainConfig, load_config
from retrain.datums import build_datums
from retrain.errors import ConfigError
from retrain.overlap import Overlapped, Sequential, choose_overlap
from retrain.planning.masks import PlanningMasks
from retrain.testing import FakeBackend, ScriptedEngine
from retrain.types import Completion, Datum, Example, FloatArray, Group, Obstacle, Score


class Recording(FakeBackend):
    """A backend that writes down what it is given."""

    def __init__(self, obstacle: Obstacle | None = None) -> None:
        super().__init__(ScriptedEngine(lambda *_: ""))
        self.obstacle = obstacle
        self.given: dict[int, list[Datum]] = {}
        self.discarded = 0

    def overlap_obstacle(self) -> Obstacle | None:
        return self.obstacle

    def accumulate(self, part: int, datums: Sequence[Datum]) -> None:
        self.given[part] = list(datums)

    def discard_parts(self) -> None:
        self.discarded += 1


def group(number: int, *values: float) -> Group:
    ids, rng = np.array([number, 7, 8]), np.random.default_rng(number)
    completions = [Completion(ids + at, -rng.random(3), f"{number}", "stop") for at in range(len(values))]
    scores = [Score(value, "right" if value else "wrong") for value in values]
    return Group(Example(str(number), ""), np.array([number]), tuple(completions), tuple(scores))


def config_of(**options: Any) -> TrainConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in options.items()})


def overlapped(made: Recording, config: TrainConfig, planning: PlanningMasks | None = None) -> Overlapped:
    return Overlapped(made, CreditAssigner(config), planning, config)


class EveryOther:
    """A planning detector that counts its calls."""

    calls = 0

    def detect(self, token_texts: Sequence[str]) -> Any:
        self.calls += 1
        return np.arange(len(token_texts)) % 2 == 0


@pytest.mark.parametrize("transform", ["gtpo_sepa", "gtpo_hicra", "gtpo", "none"])
def test_credit_of_a_group_is_the_one_it_gets_in_the_complete_step(transform: str) -> None:
    config = config_of(algorithm__transform_mode=transform, training__batch_size=3)
    planning, made = PlanningMasks(EveryOther(), ["a"] * 200), Recording()
    own, credit = overlapped(made, config, planning), CreditAssigner(config)
    take = own.begin(0.3)
    assert take is not None
    groups = [group(0, 1, 0, 0), group(1, 1, 1, 1), group(2, 0, 1, 0)]
    for at in (2, 0, 1):
        take(at, groups[at])
    whole = credit.assign(groups, planning.of(groups), 0.3)
    expected, early = build_datums(groups, whole), [row for part in sorted(made.given) for row in made.given[part]]
    assert len(early) == len(expected) == 6
    for ours, theirs in zip(early, expected, strict=True):
        np.testing.assert_array_equal(ours.completion_ids_T, theirs.completion_ids_T)
        np.testing.assert_allclose(ours.advantages_T, theirs.advantages_T, rtol=1e-12)
    # The complete step has the same arrays, with the numbers that its groups have there.
    again = build_datums(groups[::-1], credit.assign(groups[::-1], None, 0.3), known=own.taken.datums)
    assert {id(row.advantages_T) for row in again} == {id(row.advantages_T) for row in early}
    assert [row.group for row in again] == [0, 0, 0, 2, 2, 2]


def test_planning_tokens_are_detected_once() -> None:
    config, detector = config_of(training__batch_size=2), EveryOther()
    planning = PlanningMasks(detector, ["a"] * 200)
    own = overlapped(Recording(), config, planning)
    take, groups = own.begin(0.0), [group(0, 1, 0), group(1, 1, 0)]
    assert take is not None
    take(1, groups[1])
    assert len(planning.of(groups, own.taken.masks)) == 2
    assert detector.calls == 4


def test_parts_have_a_fixed_number_of_groups_whatever_comes_first() -> None:
    made = Recording()
    own = overlapped(made, config_of(training__batch_size=20))
    take = own.begin(0.0)
    assert take is not None and own.part_size == 3
    for at in (5, 0, 3, 1, 19, 18):
        take(at, group(at, 1, 0))
    assert made.given == {}
    take(4, group(4, 1, 1))
    take(2, group(2, 1, 0))
    assert {part: [int(row.prompt_ids[0]) for row in rows] for part, rows in made.given.items()} == {
        1: [3, 3, 5, 5],
        0: [0, 0, 1, 1, 2, 2],
    }


def test_a_group_with_an_invalid_log_prob_is_left_to_the_complete_step() -> None:
    own, broken = overlapped(Recording(), config_of(training__batch_size=1)), group(0, 1, 0)
    broken.completions_G[0].logprobs_T[0] = np.nan
    take = own.begin(0.0)
    assert take is not None
    take(0, broken)
    assert own.taken.datums == {}


def test_a_step_whose_lambda_depends_on_its_rewards_is_sequential() -> None:
    assert overlapped(Recording(), config_of()).begin(None) is None


def uncertain(context: UncertaintyContext) -> FloatArray:
    return context.logprobs


def centred(rewards_G: FloatArray) -> FloatArray:
    return rewards_G - rewards_G.mean()


pooled = TransformSpec("pooled", batch_entropy_transform=sepa_pool)

SHARED = Obstacle("sampling and training share cuda:0", is_final=False)


@pytest.mark.parametrize(
    ("options", "obstacle", "is_on", "line"),
    [
        ({}, None, True, "Steps are overlapped: groups are trained on while others are still being sampled."),
        (
            {},
            SHARED,
            False,
            "Steps are sequential: sampling and training share cuda:0 ([training] overlap = true overlaps them).",
        ),
        ({"training__overlap": True}, SHARED, True, "Steps are overlapped"),
        ({"training__overlap": False}, None, False, ""),
        (
            {"algorithm__advantage_mode": "test_overlap.centred"},
            None,
            False,
            "Steps are sequential: [algorithm] advantage_mode = 'test_overlap.centred' may depend on earlier groups",
        ),
        (
            {"algorithm__advantage_mode": "test_overlap.centred", "training__overlap": True},
            None,
            True,
            "Steps are o",
        ),
        (
            {"algorithm__uncertainty_kind": "test_overlap.uncertain"},
            SHARED,
            False,
            "Steps are sequential: [algorithm] uncertainty_kind = 'test_overlap.uncertain' needs complete steps.",
        ),
        (
            {"algorithm__transform_mode": "test_overlap.pooled"},
            None,
            False,
            "Steps are sequential: [algorithm] transform_mode = 'test_overlap.pooled' needs complete steps.",
        ),
        (
            {"teaching__enabled": True},
            None,
            False,
            "Steps are sequential: [teaching] scores the teaching texts of a step together.",
        ),
    ],
)
def test_the_choice_and_its_reason_are_printed(
    options: dict[str, Any], obstacle: Obstacle | None, is_on: bool, line: str
) -> None:
    config, printed = config_of(**options), list[str]()
    chosen = choose_overlap(config, Recording(obstacle), CreditAssigner(config), None, printed.append)
    assert isinstance(chosen, Overlapped if is_on else Sequential)
    assert "\n".join(printed).startswith(line) and bool(printed) == bool(line)


@pytest.mark.parametrize(
    "options", [{"algorithm__uncertainty_kind": "test_overlap.uncertain"}, {"teaching__enabled": True}]
)
def test_what_is_impossible_is_an_error_if_it_is_asked_for(options: dict[str, Any]) -> None:
    config = config_of(training__overlap=True, **options)
    with pytest.raises(ConfigError, match="overlap = true is not possible"):
        choose_overlap(config, Recording(), CreditAssigner(config), None, print)


def test_a_discarded_step_is_discarded_by_the_Recording() -> None:
    made = Recording()
    overlapped(made, config_of()).discard()
    assert made.discarded == 1
