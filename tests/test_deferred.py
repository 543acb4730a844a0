"""Signals that wait until what must not be cut in two is over."""

from __future__ import annotations

import os
import signal

import pytest

from retrain.runtime.interrupts import Interrupts, deferred


def test_a_signal_waits_until_it_is_over() -> None:
    done = []
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        with deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        done.append("never")
    assert done == ["whole"]


def test_without_a_signal_nothing_happens_and_handlers_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_force_skips_the_check() -> None:
    done = []
    with Interrupts(), pytest.raises(KeyboardInterrupt), deferred():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == []


def test_an_error_inside_is_the_one_that_is_raised() -> None:
    with Interrupts(), pytest.raises(ValueError, match="inside"), deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("inside")
