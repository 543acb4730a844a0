"""The SEPA schedules, the gate, and what a checkpoint keeps of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.sepa import SEPAController
from retrain.config.schema import Sepa
from retrain.errors import CheckpointError


def controller(**options: object) -> SEPAController:
    """A controller whose gate is open."""
    return SEPAController(Sepa(**{"correct_rate_gate": 0.0, **options}))


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (50, 0.0), (51, 0.002), (300, 0.5), (550, 1.0), (9999, 1.0)])
def test_linear_ramps_from_the_delay_on(step: int, expected: float) -> None:
    assert controller(steps=500, delay_steps=50).resolve_lambda(step) == pytest.approx(expected)


def test_linear_pays_no_heed_to_variance() -> None:
    linear = controller(schedule="linear", steps=100, delay_steps=0)
    for _ in range(60):
        linear.update(1.0)
    linear.update(0.0)
    assert linear.resolve_lambda(10) == 0.1


def test_the_gate_holds_lambda_at_zero_until_it_is_reached_and_stays_open() -> None:
    gated = SEPAController(Sepa(steps=10, delay_steps=0, correct_rate_gate=0.1))
    gated.observe_correct_rate(0.09)
    assert not gated.gate_open
    assert gated.resolve_lambda(5) == 0.0
    gated.observe_correct_rate(0.1)
    assert gated.gate_open
    assert gated.resolve_lambda(5) == 0.5
    gated.observe_correct_rate(0.0)
    assert gated.resolve_lambda(5) == 0.5


def test_the_gate_holds_auto_too() -> None:
    gated = SEPAController(Sepa(schedule="auto", steps=10, delay_steps=0, correct_rate_gate=0.5))
    for variance in [1.0] * 50 + [0.0] * 500:
        gated.update(variance)
    assert gated.resolve_lambda(5) == 0.0
    gated.observe_correct_rate(1.0)
    assert gated.resolve_lambda(5) > 0.5


def test_auto_follows_the_decay_of_variance_once_fifty_batches_are_seen() -> None:
    auto = controller(schedule="auto", steps=1_000_000, delay_steps=1_000_000)
    for _ in range(49):
        auto.update(4.0)
    auto.update(0.0)
    # v0 = 0.99 * 4 = 3.96; each further 0 leaves 0.99 of the average, so after n it is 0.99^n of v0.
    for _ in range(160):
        auto.update(0.0)
    assert auto.resolve_lambda(0) == 0.0  # 0.99^160 = 0.2003 > 0.2
    for _ in range(40):
        auto.update(0.0)
    assert auto.resolve_lambda(0) == pytest.approx(1 - 0.99**200 / 0.2)


def test_auto_is_nothing_before_fifty_batches() -> None:
    auto = controller(schedule="auto", steps=1_000_000, delay_steps=1_000_000)
    for variance in [5.0] + [0.0] * 48:
        auto.update(variance)
    assert auto.resolve_lambda(0) == 0.0
    assert auto.state_dict()["initial"] is None


def test_auto_takes_the_larger_of_both_schedules() -> None:
    auto = controller(schedule="auto", steps=100, delay_steps=0)
    for _ in range(60):
        auto.update(1.0)
    assert auto.resolve_lambda(30) == 0.3


def test_auto_with_no_variance_to_begin_with_is_linear() -> None:
    auto = controller(schedule="auto", steps=100, delay_steps=0)
    for _ in range(60):
        auto.update(0.0)
    assert auto.resolve_lambda(30) == 0.3


def test_update_takes_uncertainties_or_their_variance_and_skips_batches_without_tokens() -> None:
    by_values, by_variance = controller(), controller()
    values = np.array([1.0, 2.0, 6.0])
    by_values.update(values)
    by_values.update(np.zeros(0))
    by_values.update(None)
    by_variance.update(14 / 3)
    assert by_values.state_dict() == pytest.approx(by_variance.state_dict())
    assert by_values.state_dict()["observed"] == 1


@pytest.mark.parametrize("variance", [-1.0, float("nan"), float("inf")])
def test_an_impossible_variance_is_rejected(variance: float) -> None:
    with pytest.raises(ValueError, match="not a valid variance"):
        controller().update(variance)


@given(
    st.lists(st.floats(0.0, 10.0), max_size=120),
    st.lists(st.floats(0.0, 10.0), max_size=20),
    st.floats(0.0, 1.0),
    st.integers(0, 2000),
)
def test_a_state_that_went_through_json_gives_the_same_lambdas_to_the_bit(before, after, rate, step) -> None:
    config = Sepa(schedule="auto", correct_rate_gate=0.5)
    whole, first, second = SEPAController(config), SEPAController(config), SEPAController(config)
    for each in (whole, first):
        each.observe_correct_rate(rate)
        for variance in before:
            each.update(variance)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for each in (whole, second):
        for variance in after:
            each.update(variance)
    assert second.resolve_lambda(step) == whole.resolve_lambda(step)
    assert second.state_dict() == whole.state_dict()


def test_a_state_that_lacks_something_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="has no 'ema'"):
        controller().load_state_dict({"gate_open": True, "observed": 3, "initial": None})


def test_lambda_is_known_before_the_rewards_unless_they_may_open_the_gate() -> None:
    gated = SEPAController(Sepa(steps=10, delay_steps=3, correct_rate_gate=0.1))
    assert gated.known_lambda(3) == 0.0, "open or not"
    assert gated.known_lambda(5) is None
    gated.observe_correct_rate(0.5)
    assert gated.known_lambda(5) == gated.resolve_lambda(5) == 0.2
