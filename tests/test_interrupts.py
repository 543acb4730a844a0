from __future__ import annotations

import os
import signal
import threading

import pytest

from retrain.interrupts import Interrupts


def strike(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_once_between_steps(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        assert interrupts.between_steps
        strike(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_a_step_waits_for_its_end(number: int) -> None:
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            strike(number)
            strike(number)
            assert not interrupts.between_steps
            done.append("the rest of the step")
        assert interrupts.between_steps
    assert done


def test_a_step_can_begin_before_its_block() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        strike()
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            pass


def test_an_error_within_a_step_leaves_it_half_done() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(ValueError, match="half"), interrupts.held():
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
        with Interrupts() as interrupts, interrupts.held():
            seen.append(interrupts.previous)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{}]
