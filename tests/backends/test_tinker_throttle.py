"""The semaphore on disk, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from waiting import wait_for

from retrain.backends.tinker.throttle import Throttle
from retrain.errors import ConfigError

# Forks `count` workers, which start together and note when they enter and leave. Lines are appended whole.
WORKERS = """
import os, sys, time
from retrain.backends.tinker.throttle import Throttle
folder, slots, count, rounds, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
begin = time.monotonic() + (0.3 if count > 1 else 0.0)
for _ in range(count - 1):
    if os.fork() == 0:
        break
throttle = Throttle(folder, slots, lambda line: None)
time.sleep(max(0.0, begin - time.monotonic()))
for _ in range(rounds):
    with throttle.slot():
        os.write(log, f"in {os.getpid()} {time.monotonic()}\\n".encode())
        time.sleep(seconds)
        os.write(log, f"out {os.getpid()} {time.monotonic()}\\n".encode())
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def start(folder: Path, slots: int, count: int, rounds: int, seconds: float) -> subprocess.Popen[bytes]:
    arguments = map(str, (folder, slots, count, rounds, seconds))
    return subprocess.Popen([sys.executable, "-c", WORKERS, *arguments])


def events(folder: Path) -> list[tuple[str, int, float]]:
    rows = [line.split() for line in (folder / "log").read_text().splitlines()]
    return sorted(((kind, int(pid), float(at)) for kind, pid, at in rows), key=lambda row: row[2])


def quiet(line: str) -> None:
    pass


@pytest.mark.slow
def test_sixteen_processes_share_four_slots_and_none_starves(tmp_path: Path) -> None:
    rounds = 12
    assert start(tmp_path, 4, 16, rounds, 0.02).wait(60) == 0
    logged_events = events(tmp_path)
    inside, most, entered = 0, 0, Counter()
    for kind, pid, _ in logged_events:
        inside += 1 if kind == "in" else -1
        most = max(most, inside)
        entered[pid] += kind == "in"
    assert most == 4
    assert list(entered.values()) == [rounds] * 16
    # Until the first is through, all compete: by then everybody has had a fair share.
    first_done = min(max(at for _, pid, at in logged_events if pid == worker) for worker in entered)
    shares = Counter(pid for kind, pid, at in logged_events if kind == "in" and at <= first_done)
    assert min(shares[worker] for worker in entered) >= rounds // 4, shares


def test_the_slots_of_a_killed_holder_are_free_at_once(tmp_path: Path) -> None:
    holder = start(tmp_path, 1, 1, 1, 60.0)
    wait_for(lambda: (tmp_path / "log").exists() and "in" in (tmp_path / "log").read_text())
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    began = time.monotonic()
    with Throttle(str(tmp_path), 1, quiet).slot():
        assert time.monotonic() - began < 10.0


def test_whoever_is_killed_in_line_does_not_hold_up_the_others(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path), 1, quiet)
    with throttle.slot():
        waiting = start(tmp_path, 1, 1, 1, 0.0)
        time.sleep(1.0)
        os.kill(waiting.pid, signal.SIGKILL)
        waiting.wait(10)
    began = time.monotonic()
    with throttle.slot():
        assert time.monotonic() - began < 10.0


def test_threads_of_one_process_are_counted_too(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path), 2, quiet)
    lock, inside, seen = threading.Lock(), [0], []

    def work() -> None:
        with throttle.slot():
            with lock:
                inside[0] += 1
                seen.append(inside[0])
            time.sleep(0.02)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 8 and max(seen) == 2


def test_an_error_inside_gives_the_slot_back(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path), 1, quiet)
    with pytest.raises(KeyboardInterrupt), throttle.slot():
        raise KeyboardInterrupt
    with throttle.slot():
        pass


def test_a_lone_run_pays_next_to_nothing(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path), 4, quiet)
    taken = []
    for _ in range(100):
        began = time.perf_counter()
        with throttle.slot():
            pass
        taken.append(time.perf_counter() - began)
    assert median(taken) < 0.005


def test_waiting_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.backends.tinker.throttle._NOTIFY_AFTER_S", 0.05)
    logged: list[str] = []
    throttle = Throttle(str(tmp_path), 1, logged.append)
    with throttle.slot():
        waiting = threading.Thread(target=lambda: throttle.slot().__enter__())
        waiting.start()
        wait_for(lambda: bool(logged))
    waiting.join(10)
    assert logged == ["Waiting for other runs: [backend] max_concurrent = 1 are in a Tinker call."]


def test_a_folder_that_cannot_be_written_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="throttle_dir"):
        Throttle(str(tmp_path / "file" / "below"), 4, quiet)


def test_without_a_folder_all_runs_of_a_user_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Throttle("", 4, quiet).folder == Throttle("", 2, quiet).folder == tmp_path / f"retrain_tinker_{os.getuid()}"
