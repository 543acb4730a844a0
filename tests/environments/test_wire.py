"""Messages of the environment's process."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.environments import Outcome
from retrain.environments.wire import outcome_fields
from retrain.errors import RolloutError


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0)])
def test_whatever_is_a_number_is_a_reward(reward: float) -> None:
    assert outcome_fields(Outcome(reward))["reward"] == 1.0


@pytest.mark.parametrize("reward", ["1.0", b"1"])
def test_a_text_is_not_a_reward_even_if_it_could_be_parsed(reward: float) -> None:
    with pytest.raises(RolloutError, match="which is not a number"):
        outcome_fields(Outcome(reward))


@pytest.mark.parametrize("value", ["20", None, [1, 2]])
def test_a_metric_that_is_not_a_number_is_named(value: float) -> None:
    with pytest.raises(RolloutError, match=r"the metric 'answer' .*, which is not a number"):
        outcome_fields(Outcome(1.0, {"answer": value}))
