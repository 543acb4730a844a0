"""Trackers that hang, fail or are slow must cost training nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import fake_config, rows, train_quietly
from e2e.tiny import write_tokenizer

from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigError
from retrain.tracking import background
from retrain.tracking.background import BackgroundTracker
from retrain.types import StepMetrics


class FakeTracker:
    """Waits or fails at a given call."""

    def __init__(self, hang: str = "", fail: str = "", error: Exception | None = None) -> None:
        self.hang = hang
        self.fail = fail
        self.error = error or RuntimeError("no network")
        self.release = threading.Event()
        self.received: list[str] = []

    def _do(self, what: str) -> None:
        if self.hang == what:
            self.release.wait(30)
        if self.fail == what:
            raise self.error
        self.received.append(what)

    def start(self, config: TrainConfig) -> None:
        self._do("start")

    def log(self, step: int, metrics: StepMetrics, groups: Any) -> None:
        self._do("log")

    def finish(self) -> None:
        self._do("finish")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_S", 0.1)
    monkeypatch.setattr(background, "FINISH_S", 0.1)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    yield []


def track(tracker: FakeTracker, logged: list[str], steps: int = 3) -> float:
    """A run of a few steps; returns the longest that any step was kept waiting."""
    wrapped = BackgroundTracker("wandb", tracker, logged.append)
    wrapped.start(load_config())
    waits = []
    for step in range(steps):
        started = time.monotonic()
        wrapped.log(step, {"loss": 0.5}, ())
        waits.append(time.monotonic() - started)
    wrapped.finish()
    tracker.release.set()
    return max(waits)


def test_a_tracker_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(background, "FINISH_S", 10.0)
    tracker = FakeTracker()
    track(tracker, logged)
    assert tracker.received == ["start", "log", "log", "log", "finish"]
    assert logged == []


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_hangs_keeps_nobody_waiting(where: str, logged: list[str]) -> None:
    assert track(FakeTracker(hang=where), logged) < 0.05
    assert any("was still busy after 0.1 s and was abandoned" in line for line in logged)


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_tracker_that_fails_is_left_out_with_a_warning(
    where: str, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FINISH_S", 10.0)
    tracker = FakeTracker(fail=where)
    track(tracker, logged)
    assert logged == ["Warning: wandb failed and is disabled: RuntimeError: no network"]
    assert "log" not in tracker.received


def test_a_tracker_that_fails_at_the_end_is_forgiven(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FINISH_S", 10.0)
    track(FakeTracker(fail="finish"), logged)
    assert logged == []


def test_wrong_input_is_reported_before_training(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_S", 10.0)
    with pytest.raises(ConfigError, match="no such project"):
        track(FakeTracker(fail="start", error=ConfigError("no such project")), logged)


def test_what_a_slow_tracker_cannot_take_is_dropped_and_counted(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_QUEUED", 2)
    assert track(FakeTracker(hang="start"), logged, steps=10) < 0.05
    assert logged[-1] == "Warning: wandb was too slow: 8 steps are missing there; the logs have them."


def test_a_complete_run_ends_although_its_tracker_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker(hang="log")
    monkeypatch.setattr(
        "retrain.assemble._build_dashboards", lambda config, folder, log: BackgroundTracker("wandb", tracker, log)
    )
    config = fake_config(write_tokenizer(tmp_path / "tokenizer"), tmp_path)
    result, printed = train_quietly(config)
    tracker.release.set()
    assert result.steps == 4
    assert len(rows(config.logging.log_dir)) == 4
    assert "wandb was still busy" in printed
