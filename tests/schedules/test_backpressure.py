"""A machine that follows the law, with noise, and what back pressure makes of it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.schema import Backpressure
from retrain.schedules.backpressure import USL, BackPressure, NoBackPressure, USLBackPressure, fit_usl
from retrain.types import StepMetrics

KEYS = {"bp_action", "bp_regime", "bp_p_star", "bp_sigma", "bp_kappa", "bp_utilization", "bp_throughput"}


def pressure(group_size: int = 4, **settings: Any) -> USLBackPressure:
    return USLBackPressure(Backpressure(**({"enabled": True} | settings)), group_size)


def step_of(batch_size: int, group_size: int, throughput: float) -> StepMetrics:
    """A step whose completions have ten tokens each; half the time goes into sampling."""
    seconds = batch_size * group_size * 10 / throughput
    return {
        "batch_size": batch_size,
        "group_size": group_size,
        "sample_time_s": seconds / 2,
        "score_time_s": seconds / 8,
        "train_time_s": seconds * 3 / 8,
        "tokens_per_s": throughput * 2,
        # An evaluation took a minute, which is no part of the step.
        "step_time_s": seconds + 60.0,
    }


def drive(watcher: BackPressure, law: USL, steps: int, start: int = 8, noise: float = 0.02, seed: int = 0) -> list[int]:
    """The batch sizes of a run on a machine that follows `law`."""
    assert isinstance(watcher, USLBackPressure)
    rng = np.random.default_rng(seed)
    sizes, batch = [], start
    for _ in range(steps):
        sizes.append(batch)
        throughput = law.throughput(batch * watcher.group_size) * float(np.exp(noise * rng.normal()))
        watcher.observe(step_of(batch, watcher.group_size, throughput))
        batch = watcher.recommend(batch)
    return sizes


@given(st.floats(0, 0.9), st.floats(1e-6, 1e-2), st.floats(0.1, 1e5))
def test_a_law_without_noise_is_recovered(sigma: float, kappa: float, gamma: float) -> None:
    law = USL(gamma, sigma, kappa)
    sizes = np.array([1.0, 2, 4, 8, 16, 32, 64, 128])
    fitted = fit_usl(sizes, np.array([law.throughput(p) for p in sizes]))
    assert fitted is not None
    assert fitted.sigma == pytest.approx(sigma, abs=1e-4)
    assert fitted.kappa == pytest.approx(kappa, rel=1e-2, abs=1e-6)
    assert fitted.gamma == pytest.approx(gamma, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sigma", "kappa", "group"), [(0.05, 5e-4, 4), (0.02, 2e-4, 4), (0.1, 1e-3, 2), (0.03, 2e-5, 16)]
)
def test_with_noise_sigma_and_kappa_are_within_10_percent_and_the_peak_within_15(
    sigma: float, kappa: float, group: int, seed: int
) -> None:
    watcher, law = pressure(group, warmup_steps=28), USL(100.0, sigma, kappa)
    sizes = drive(watcher, law, 60, seed=seed)
    assert watcher.law is not None
    assert watcher.law.sigma == pytest.approx(sigma, rel=0.1)
    assert watcher.law.kappa == pytest.approx(kappa, rel=0.1)
    assert watcher.law.p_star == pytest.approx(law.p_star, rel=0.15)
    assert len(set(sizes[28:])) == 1, "it settles"
    assert 0.6 * law.p_star <= sizes[-1] * group <= 0.9 * law.p_star
    assert (watcher.action, watcher.regime) == ("hold", "optimal")


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_what_has_settled_stays_when_exploration_has_left_the_window(noise: float) -> None:
    watcher = pressure(warmup_steps=10)
    sizes = drive(watcher, USL(100.0, 0.05, 5e-4), 400, noise=noise)
    assert len(set(sizes[20:])) <= 2
    assert len(watcher.seen) < 150


def test_warm_up_explores_by_doubling_within_the_bounds() -> None:
    assert drive(pressure(warmup_steps=9), USL(100.0, 0.05, 5e-4), 9) == [8, 1, 2, 4, 8, 16, 32, 64, 1]
    bounded = pressure(warmup_steps=6, min_batch_size=3, max_batch_size=10)
    assert drive(bounded, USL(100.0, 0.05, 5e-4), 6) == [8, 3, 6, 10, 3, 6]


def test_a_curve_that_keeps_rising_leads_to_the_largest_batch() -> None:
    watcher = pressure(warmup_steps=14)
    sizes = drive(watcher, USL(100.0, 0.0, 0.0), 40)
    assert sizes[-1] == 64
    metrics = watcher.metrics()
    assert metrics["bp_p_star"] is None or float(metrics["bp_p_star"]) > 64 * 4


def test_a_flat_curve_settles_within_bounds() -> None:
    # Full contention: more at a time is not faster, and not slower either.
    watcher = pressure(warmup_steps=14)
    sizes = drive(watcher, USL(100.0, 1.0, 0.0), 60, noise=0.02)
    assert watcher.law is not None and watcher.law.sigma > 0.9
    assert all(1 <= size <= 64 for size in sizes)
    assert len(set(sizes[-20:])) <= 2


def test_a_retrograde_machine_is_throttled_below_its_peak() -> None:
    law = USL(100.0, 0.1, 5e-3)
    watcher = pressure(warmup_steps=10)
    sizes = drive(watcher, law, 40)
    assert law.p_star < 4 * 8, "it starts beyond the peak"
    assert sizes[-1] * 4 <= law.p_star
    assert watcher.recommend(64) < 64 and watcher.action == "throttle"
    watcher.observe(step_of(64, 4, law.throughput(256)))
    assert watcher.regime == "retrograde"


def test_a_batch_far_below_the_aim_grows_and_one_near_it_holds() -> None:
    watcher, law = pressure(warmup_steps=14), USL(100.0, 0.02, 2e-4)
    drive(watcher, law, 30, noise=0.0)
    aim = int(0.85 * law.p_star / 4)
    assert watcher.recommend(2) == aim and watcher.action == "increase"
    assert watcher.recommend(aim // 2 + 1) == aim // 2 + 1 and watcher.action == "hold"
    assert watcher.recommend(aim + 2) == aim and watcher.action == "throttle"
    small = pressure(warmup_steps=14, max_batch_size=8)
    assert drive(small, law, 30, noise=0.0)[-1] == 8, "never above the largest"


def test_regimes_by_the_roofline() -> None:
    law = USL(100.0, 0.02, 2e-4)
    # The ridge is at 40 operations a byte; in bf16 p completions do p operations a byte.
    hinted = pressure(warmup_steps=14, peak_gflops=4000.0, peak_bw_gb_s=100.0)
    drive(hinted, law, 30, noise=0.0)
    assert hinted.regime == "compute_bound"
    assert pressure_after(law, peak_gflops=40_000.0, peak_bw_gb_s=100.0).regime == "optimal"
    assert pressure_after(law).regime == "optimal"
    wide = USLBackPressure(hinted.settings, 4, bytes_per_weight=4)
    drive(wide, law, 30, noise=0.0)
    assert wide.regime == "optimal", "in float32 every weight costs twice the bytes"


def pressure_after(law: USL, **settings: Any) -> USLBackPressure:
    watcher = pressure(warmup_steps=14, **settings)
    drive(watcher, law, 30, noise=0.0)
    return watcher


def test_steps_slower_than_the_law_are_memory_bound() -> None:
    law = USL(100.0, 0.02, 2e-4)
    watcher = pressure_after(law, ema_decay=0.0)
    p = watcher.seen[-1][0]
    watcher.observe(step_of(p // 4, 4, law.throughput(p) * 0.7))
    assert watcher.regime == "memory_bound"


def test_the_first_step_of_a_process_and_empty_steps_say_nothing() -> None:
    watcher = pressure()
    watcher.observe(step_of(8, 4, 1.0))
    assert watcher.seen == []
    watcher.observe(step_of(8, 4, 50.0) | {"tokens_per_s": 0.0})
    assert watcher.seen == []
    assert watcher.observed == 2
    assert watcher.metrics()["bp_throughput"] is None


def test_the_throughput_shown_is_one_of_the_size_of_the_step() -> None:
    watcher = pressure_after(USL(100.0, 0.05, 5e-4))
    before = watcher.throughput
    size = watcher.seen[-1][0] // watcher.group_size
    watcher.fresh = True
    watcher.observe(step_of(size, watcher.group_size, 1.0))
    assert watcher.throughput == before
    watcher.fresh = True
    watcher.observe(step_of(size + 1, watcher.group_size, 1.0))
    assert watcher.metrics()["bp_throughput"] is None


def test_a_range_of_two_sizes_takes_the_faster_and_one_size_stays() -> None:
    law = USL(100.0, 0.0, 1e-2)
    two = pressure(1, warmup_steps=6, min_batch_size=16, max_batch_size=32)
    assert drive(two, law, 12)[-1] == 16
    one = pressure(1, warmup_steps=3, min_batch_size=8, max_batch_size=8)
    assert drive(one, law, 6, start=4)[-1] == 8


def test_a_restored_watcher_decides_as_the_one_that_went_on() -> None:
    law, settings = USL(100.0, 0.05, 5e-4), {"warmup_steps": 12}
    for cut in (0, 5, 20):
        straight, saved = pressure(**settings), pressure(**settings)
        drive(straight, law, cut)
        drive(saved, law, cut)
        restored = pressure(**settings)
        restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        assert restored.metrics() == straight.metrics()
        # The first step of a process is left out, so both begin with one that says nothing.
        for watcher in (straight, restored):
            watcher.fresh = True
        assert drive(restored, law, 25, seed=1) == drive(straight, law, 25, seed=1)
        assert restored.state_dict() == straight.state_dict()
    blank = pressure()
    blank.load_state_dict(NoBackPressure().state_dict())
    assert blank.observed == 0


@pytest.mark.parametrize(("sigma", "kappa"), [(1.0, 0.01), (1.0, 10.0), (0.99, 1.0)])
def test_throughput_that_only_falls_is_best_at_the_smallest_size(sigma: float, kappa: float) -> None:
    falling = pressure(1, warmup_steps=12)
    law = USL(100.0, sigma, kappa)
    assert drive(falling, law, 20, noise=0.0)[-1] == 1
    assert falling.metrics()["bp_utilization"] == pytest.approx(1.0, rel=1e-3)
    falling.law = law
    assert law.p_star < 1 and falling.metrics()["bp_utilization"] == pytest.approx(1.0, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e9)), max_size=30))
def test_steps_of_any_speed_have_metrics(steps: list[tuple[int, float]]) -> None:
    watcher = pressure(1, warmup_steps=1)
    for batch_size, throughput in steps:
        watcher.observe(step_of(batch_size, 1, throughput))
        assert 1 <= watcher.recommend(batch_size) <= 64
        share = watcher.metrics()["bp_utilization"]
        assert share is None or 0 < float(share) < math.inf


def test_both_kinds_log_the_same_keys() -> None:
    assert set(NoBackPressure().metrics()) == KEYS == set(pressure().metrics())
    assert NoBackPressure().recommend(7) == 7
    assert pressure_after(USL(100.0, 0.05, 5e-4)).metrics()["bp_utilization"] == pytest.approx(1.0, abs=0.05)
