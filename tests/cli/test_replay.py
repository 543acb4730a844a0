"""`retrain replay`: the row of all steps."""

from __future__ import annotations

import pytest

from retrain.analysis.replay import Difference
from retrain.cli.replay import total


def test_a_share_of_all_steps_is_one_of_their_absolute_advantage() -> None:
    first = Difference(0, 10, 1.0, 2.0, 1.0, 1, 0.5, 0.25)
    silent = Difference(1, 90, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
    last = Difference(2, 30, 1.0, 1.0, 0.5, 2, 0.1, 0.5)
    found = total([first, silent, last])
    assert (found.step, found.tokens, found.sign_flips) == (-1, 130, 3)
    assert (found.mean_before, found.mean_after) == pytest.approx((40 / 130, 50 / 130))
    assert found.changed == pytest.approx(25 / 130)
    # 5 of 10 and 3 of 30; 5 of 20 and 15 of 30.
    assert (found.planning_before, found.planning_after) == pytest.approx((8 / 40, 20 / 50))
    assert total([silent, silent]).planning_before == 0.0
