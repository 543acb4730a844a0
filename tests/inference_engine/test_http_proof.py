"""The judgement on whose log-probs a server reports: by hand, and for any noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.inference_engine.http.proof import identify_weights

NEWEST = np.array([-1.0, -2.0, -0.5, -3.0])
PREVIOUS = np.array([-1.2, -1.9, -0.5, -3.3])
BASE = np.array([-1.5, -2.5, -0.1, -2.0])
OLDER = {"previous": PREVIOUS, "base": BASE}


def test_the_newest_weights_give_one_and_older_ones_are_named() -> None:
    assert identify_weights(NEWEST, NEWEST, OLDER, 0.05).proof == 1.0
    assert identify_weights(NEWEST, NEWEST, OLDER, 0.05).wrong == ""
    assert identify_weights(PREVIOUS, NEWEST, OLDER, 0.05).wrong == "previous"
    assert identify_weights(PREVIOUS, NEWEST, {"previous": PREVIOUS}, 0.05).proof == pytest.approx(0.0)
    assert identify_weights(BASE, NEWEST, OLDER, 0.05).wrong == "base"


def test_a_share_by_hand() -> None:
    # gap = (0.1, 0), line = (1, 0): a tenth of the way to the older weights.
    verdict = identify_weights(np.array([-0.9, -1.0]), np.array([-1.0, -1.0]), {"older": np.array([0.0, -1.0])}, 1.0)
    assert verdict.proof == pytest.approx(0.9)
    assert verdict.mismatch_mean == pytest.approx(0.05)
    assert verdict.mismatch_max == pytest.approx(0.1)
    # exp(-gap) - 1 + gap at gap = 0.1, halved.
    assert verdict.mismatch_kl == pytest.approx((np.exp(-0.1) - 0.9) / 2)


def test_weights_that_cannot_be_distinguished_prove_nothing() -> None:
    assert identify_weights(NEWEST, NEWEST, {"previous": NEWEST}, 0.05).proof is None
    noise = np.array([0.03, -0.03, 0.02, -0.02])
    verdict = identify_weights(NEWEST + noise, NEWEST, {"previous": NEWEST + 1e-4 * noise[::-1]}, 0.05)
    assert (verdict.proof, verdict.wrong) == (None, "")


def test_log_probs_that_fit_nothing_are_named_so() -> None:
    verdict = identify_weights(NEWEST + np.array([3.0, -3.0, 3.0, -3.0]), NEWEST, OLDER, 0.05)
    assert verdict.wrong.startswith("neither")


@given(st.integers(0, 10_000), st.floats(1e-6, 0.04), st.floats(0.02, 1.0), st.booleans())
def test_noise_between_server_and_trainer_never_convicts_the_newest_weights(
    seed: int, noise: float, update: float, swapped: bool
) -> None:
    rng = np.random.default_rng(seed)
    newest = -rng.exponential(1.0, 128)
    previous = newest + rng.normal(0, update, 128)
    server = (previous if swapped else newest) + rng.normal(0, noise, 128)
    verdict = identify_weights(server, newest, {"previous": previous}, limit=2.0)
    assert verdict.wrong in (("previous", "") if swapped else ("",))
    if swapped and update > 4 * noise:
        assert verdict.wrong == "previous"
