"""The clock that stands still while the process does."""

from __future__ import annotations

import os
import time

import pytest
from pausing import linux_only, pause

from retrain.runtime import clock
from retrain.runtime.clock import awake_s


@linux_only
def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    before, began = awake_s(), time.monotonic()
    with pause(3.0, after_s=0.1):
        time.sleep(0.5)
    assert time.monotonic() - began >= 3.0
    assert awake_s() - before < 2.5


def test_it_goes_on_while_a_thread_works_or_waits() -> None:
    before = awake_s()
    time.sleep(1.5)
    until = time.process_time() + 1.5
    while time.process_time() < until:
        pass
    # A process that is not stopped loses none of it, unless the machine is very busy.
    assert awake_s() - before > 1.5


def test_it_goes_on_while_one_thread_keeps_all_others_from_running() -> None:
    awake_s()
    before, used = awake_s(), time.process_time()
    sum(range(10**8))  # one call, which does not give up the GIL
    assert awake_s() - before >= 0.8 * (time.process_time() - used)


def test_it_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock.time, "process_time", lambda: 1.0)
    own = clock._Clock.__new__(clock._Clock)
    own.lock, own.stopped_s, own.read_at, own.used_s = clock.threading.Lock(), 0.0, now[0], 1.0
    readings = []
    for passed in (0.2, 0.9, 3600.0, 0.0, 0.1, 1.1, 0.2):
        now[0] += passed
        readings.append(own.read())
    assert readings == sorted(readings)
    assert readings[-1] == pytest.approx(100.2 + 0.9 + 0.2 + 0.1 + 0.2 + 0.2)


def test_a_forked_process_has_its_own() -> None:
    awake_s()
    child = os.fork()
    if not child:
        before = awake_s()
        time.sleep(1.5)
        os._exit(0 if awake_s() - before > 1.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
