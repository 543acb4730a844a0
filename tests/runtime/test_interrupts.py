from __future__ import annotations

import errno
import os
import signal
import threading

import pytest

from retrain.runtime.interrupts import Interrupts


def strike(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_at_once_between_steps(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        assert interrupts.between_steps
        strike(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_within_a_step_waits_for_its_end(number: int) -> None:
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.deferring():
            strike(number)
            strike(number)
            assert not interrupts.between_steps
            done.append("the rest of the step")
        assert interrupts.between_steps
    assert done


def test_the_first_signal_within_a_step_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.deferring():
        strike()
        strike()
    assert capfd.readouterr().err == "\nFinishing the step and saving. Press Ctrl-C twice more to quit immediately.\n"


def test_a_closed_terminal_does_not_disturb_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(descriptor: int, text: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    done = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.deferring():
        strike(signal.SIGHUP)
        done.append("the rest of the step")
    assert done


def test_the_third_signal_ends_even_a_step() -> None:
    struck = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.deferring():
            for time in range(9):
                struck.append(time)
                strike()
        assert not interrupts.between_steps
    assert struck == [0, 1, 2]


def test_what_is_done_about_a_signal_is_not_cut_short_by_the_next() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            strike()
        strike()
        assert interrupts.between_steps
        interrupts.hold()
        strike()
        with pytest.raises(KeyboardInterrupt):
            strike()


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            strike(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_can_begin_before_its_block() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        strike()
        with pytest.raises(KeyboardInterrupt), interrupts.deferring():
            pass


def test_an_error_within_a_step_leaves_it_half_done() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(ValueError, match="half"), interrupts.deferring():
            raise ValueError("half")
        assert not interrupts.between_steps


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_may_train_too() -> None:
    seen = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.deferring():
            seen.append(interrupts.previous)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{}]
