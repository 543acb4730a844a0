"""The lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from retrain.runtime.threads import FairLock


def test_two_threads_that_ask_again_at_once_take_turns() -> None:
    lock, turns = FairLock(), list[str]()
    both = threading.Barrier(2)

    def work(name: str) -> None:
        both.wait()
        for _ in range(50):
            with lock:
                turns.append(name)
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    switches = sum(a != b for a, b in pairwise(turns))
    assert switches > 80


def test_a_thread_that_has_the_lock_may_take_it_again() -> None:
    lock = FairLock()
    with lock, lock:
        pass
    with lock:
        pass
    assert not lock.queue


def test_a_thread_that_stops_waiting_leaves_the_queue() -> None:
    lock = FairLock()

    def give_up() -> None:
        class Impatient(threading.Condition):
            def wait_for(self, *_: object, **__: object) -> bool:
                raise KeyboardInterrupt

        own = lock.changed
        lock.changed = Impatient(threading.Lock())
        try:
            with lock:
                raise AssertionError("it has not got the lock")
        except KeyboardInterrupt:
            pass
        finally:
            lock.changed = own

    with lock:
        thread = threading.Thread(target=give_up)
        thread.start()
        thread.join()
        assert len(lock.queue) == 1
    with lock:
        pass
