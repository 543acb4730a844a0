"""Cut runs with SIGKILL, resume them, and compare all they leave, bit for bit, with the run that was never cut."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retrain.config import load_config
from retrain.config.load import dump_config

from .runs import rows, rows_without_times
from .tiny import write_model, write_tokenizer

HERE = Path(__file__).parent
STEPS = 6


class RunServer:
    """A warmed-up process that forks a child for each run; see run_server.py."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "e2e.run_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, log: Path, arguments: list[str], point: str | None = None) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(log), point, *arguments]) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        return int(self._line())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Bench:
    """One configuration, the run of it that was never cut, and how long its training took."""

    server: RunServer
    file: Path
    folder: Path
    uncut: Path
    seconds: float
    cuts: int = 0

    def arguments(self, logs: Path) -> list[str]:
        return [str(self.file), "--log-dir", str(logs), "--adapter-path", f"{logs}_adapter"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunServer]:
    made = RunServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), gain=1.5, layers=1))


def make_bench(server: RunServer, model: Path, folder: Path, **overrides: Any) -> Bench:
    file = folder / "run.toml"
    settings = {
        "model.model": str(model),
        "model.lora_rank": 4,
        "backend.devices": "cpu",
        "data.source": "arithmetic",
        "training.seed": 11,
        "training.max_steps": STEPS,
        "training.batch_size": 3,
        "training.group_size": 4,
        "training.max_tokens": 8,
        "training.temperature": 1.0,
        "training.lr": 1e-2,
        "training.save_every": 2,
        "training.record": True,
        "training.resample_dead_groups": 1,
        "sepa.steps": 4,
        "sepa.delay_steps": 1,
        "sepa.schedule": "auto",
        "eval.every": 3,
        "eval.max_examples": 4,
        "reward.type": "custom",
        "reward.custom_module": "e2e.scores",
        "reward.custom_function": "score_length",
        "reward.workers": 1,
    }
    file.write_text(dump_config(load_config(None, settings | overrides)))
    bench = Bench(server, file, folder, folder / "uncut", 0.0)
    server.start(folder / "uncut.log", bench.arguments(bench.uncut))
    wait_for_training(bench.uncut)
    began = time.monotonic()
    assert server.wait() == 0, (folder / "uncut.log").read_text()
    bench.seconds = time.monotonic() - began
    metrics = rows(bench.uncut)
    assert len(metrics) == STEPS
    assert sum(row["num_datums"] > 0 for row in metrics) >= STEPS - 1, "a run that learns nothing proves nothing"
    return bench


@pytest.fixture(scope="module")
def bench(server: RunServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(server, model, tmp_path_factory.mktemp("resume"), **{"lora.dropout": 0.1})


@pytest.fixture(scope="module")
def split_bench(server: RunServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(server, model, tmp_path_factory.mktemp("split"), **{"backend.devices": "cpu,cpu"})


def wait_for_training(logs: Path) -> None:
    """Until the loop has opened its logs."""
    deadline = time.monotonic() + 120
    while not (logs / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def cut_after(bench: Bench, delay: float) -> tuple[Path, int]:
    """Start a run and kill it so many seconds into its training."""
    logs, pid = begin(bench)
    wait_for_training(logs)
    timer = threading.Timer(delay, kill_if_alive, (pid,))
    timer.start()
    code = bench.server.wait()
    timer.cancel()
    timer.join()
    return logs, code


def kill_if_alive(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def begin(bench: Bench, point: str | None = None) -> tuple[Path, int]:
    bench.cuts += 1
    logs = bench.folder / f"cut{bench.cuts}"
    return logs, bench.server.start(bench.folder / f"cut{bench.cuts}.log", bench.arguments(logs), point)


def go_on(bench: Bench, logs: Path) -> None:
    """Do what a user does after a crash: resume, or start anew where nothing was saved yet."""
    saved = (logs / "trainer_state.json").exists()
    log = logs.with_suffix(".log")
    bench.server.start(log, ["--resume", str(logs)] if saved else bench.arguments(logs))
    assert bench.server.wait() == 0, log.read_text()


def compare(bench: Bench, logs: Path, how: str) -> None:
    """Every metric but times, every text, every evaluation, every recording, and the weights."""
    assert rows_without_times(logs) == rows_without_times(bench.uncut), how
    for name in ("emergence/steps.jsonl", "emergence/generations.jsonl", "eval.jsonl"):
        assert (logs / name).read_bytes() == (bench.uncut / name).read_bytes(), f"{name}, {how}"
    last = f"checkpoints/step_{STEPS:06d}"
    recorded = sorted(path.name for path in (bench.uncut / "rollouts").iterdir())
    assert len(recorded) == STEPS
    for name in (
        f"{last}/learner.safetensors",
        f"{last}/adapter/adapter_model.safetensors",
        *(f"rollouts/{name}" for name in recorded),
    ):
        assert (logs / name).read_bytes() == (bench.uncut / name).read_bytes(), f"{name}, {how}"
    published = Path(f"{logs}_adapter") / "adapter_model.safetensors"
    assert published.read_bytes() == (bench.uncut / last / "adapter/adapter_model.safetensors").read_bytes(), how
    assert json.loads((logs / "trainer_state.json").read_text())["status"] == "finished", how
    assert not list((logs / "checkpoints").glob(".*")), f"leftovers, {how}"


def cut_at_random(bench: Bench, number: int, seed: int) -> None:
    rng, killed = random.Random(seed), 0
    for at in range(number):
        # One instant in each slice of the run, so that they spread over the whole of it.
        delay = bench.seconds * (at + rng.random()) / number
        logs, code = cut_after(bench, delay)
        how = f"killed {delay:.3f} s into {bench.seconds:.3f} s (status {code})"
        assert code in (-signal.SIGKILL, 0), how
        killed += code != 0
        go_on(bench, logs)
        compare(bench, logs, how)
    assert killed >= number // 2, "most kills must come before the run is over"


@pytest.mark.threads
def test_two_runs_killed_at_random_instants_end_as_the_run_that_was_never_interrupted(bench: Bench) -> None:
    cut_at_random(bench, 2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_five_runs_killed_at_random_instants_end_as_the_run_that_was_never_interrupted(bench: Bench) -> None:
    cut_at_random(bench, 25, seed=int(time.time()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_again_and_again_ends_as_the_run_that_was_never_interrupted(bench: Bench) -> None:
    rng = random.Random(3)
    logs, _ = begin(bench, "retrain.trainer:write_state_file:1")
    assert bench.server.wait() == -signal.SIGKILL
    for _ in range(6):
        saved = (logs / "trainer_state.json").exists()
        pid = bench.server.start(logs.with_suffix(".log"), ["--resume", str(logs)] if saved else bench.arguments(logs))
        timer = threading.Timer(rng.uniform(0.3, 1.0) * bench.seconds + 0.5, kill_if_alive, (pid,))
        timer.start()
        bench.server.wait()
        timer.cancel()
        timer.join()
    go_on(bench, logs)
    compare(bench, logs, "killed seven times")


# Each is the last call that the process makes.
POINTS = [
    "retrain.storage.checkpoint:digest:2",  # half a checkpoint is written, the first one of the run
    "retrain.storage.checkpoint:_sync_tree:2",  # all of the second one is written, but not in its place
    "retrain.storage.checkpoint:_sync_folder:4",  # the second one is in its place, but nothing says so
    "retrain.trainer:publish_adapter:2",
    "retrain.trainer:write_state_file:1",
    "retrain.trainer:write_recording:4",
    "retrain.tracking.jsonl:generation_rows:5",  # the step's metrics are logged, its texts are not
    "retrain.trainer:finish:1",
]


@pytest.mark.slow
def test_a_kill_at_every_delicate_point_costs_nothing(bench: Bench) -> None:
    for point in POINTS:
        logs, _ = begin(bench, point)
        assert bench.server.wait() == -signal.SIGKILL, f"{point} was never reached"
        go_on(bench, logs)
        compare(bench, logs, f"killed in {point}")


@pytest.mark.slow
def test_a_killed_run_in_split_mode_ends_as_the_run_that_was_never_interrupted(split_bench: Bench) -> None:
    uncut = rows(split_bench.uncut)
    assert not any(row["loss_is_placeholder"] for row in uncut)
    assert all(row["grad_norm"] is not None and row["lr"] is not None for row in uncut), "the first and the last too"
    logs, _ = begin(split_bench, "retrain.trainer:write_recording:4")
    assert split_bench.server.wait() == -signal.SIGKILL
    go_on(split_bench, logs)
    compare(split_bench, logs, "killed in split mode")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_runs_in_split_mode_killed_at_random_end_as_the_run_that_was_never_interrupted(split_bench: Bench) -> None:
    cut_at_random(split_bench, 10, seed=2)


@pytest.mark.slow
def test_a_killed_run_leaves_no_scoring_process_behind(bench: Bench) -> None:
    _, code = cut_after(bench, 0.3 * bench.seconds)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while children := scoring_processes():
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def scoring_processes() -> list[int]:
    """Reward workers whose parent is gone: they were adopted, by init or by whoever reaps here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == 1 and "retrain.rewards.worker" in command:
            found.append(int(path.parent.name))
    return found
