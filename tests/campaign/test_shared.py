"""Runs that share a model are, to the bit, the runs that have it to themselves."""

from __future__ import annotations

import errno
import io
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from e2e.runs import rows, rows_without_times, write_problems
from e2e.tiny import config_for, policy_for, write_model, write_tokenizer
from safetensors.torch import load_file

from retrain.backends.local.shared import SharedBackend, point_at, trained_parameters
from retrain.campaign.host import Host, Turns, _appending
from retrain.campaign.plan import Run, plan_runs
from retrain.campaign.processes import prepare_folder
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.policy import fresh_adapter
from retrain.tracking.console import Console
from retrain.trainer import train
from retrain.types import Datum, StepMetrics

from .campaigns import GRPO, MAXRL, TESTS, campaign_config

SEPA = {"advantage_mode": "maxrl", "transform_mode": "gtpo", "lr": 5e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, layers=2)
    return write_tokenizer(folder)


def config_with(model: Path, folder: Path, more: dict[str, Any] | None = None, **campaign: Any) -> TrainConfig:
    tables = {
        "backend": {"backend": "local", "devices": "cpu"},
        "model": {"model": str(model), "lora_rank": 4},
        "training": {"max_tokens": 8, "lr": 1e-2},
        "lora": {"dropout": 0.1},
        "data": {"source": "jsonl", "path": str(write_problems(folder))},
        "reward": {"custom_function": "score_length"},
        "plugins": {"search_paths": [str(TESTS)]},
    }
    settings = {"seeds": [1, 2], "max_steps": 4, "conditions": [GRPO, SEPA], "share_model": True} | campaign
    return campaign_config(folder / "c", tables | (more or {}), **settings)


def run_shared(runs: list[Run]) -> dict[str, int]:
    """All of them in one process, which is this one; returns exit codes."""
    answers = io.StringIO()
    host = Host(answers)
    for run in runs:
        prepare_folder(run)
        host.start(run.folder)
    for thread in host.threads:
        thread.join()
    return {a["name"]: a["exit_code"] for a in map(json.loads, answers.getvalue().splitlines())}


def test_a_fresh_adapter_is_the_one_that_loading_with_that_seed_gives(model: Path) -> None:
    first, second = (policy_for(config_for(model, training__seed=seed), trained=False) for seed in (1, 2))
    tensors = fresh_adapter(first, 2)
    wanted = [parameter.data for parameter in trained_parameters(second)]
    assert len(tensors) == len(wanted) > 0
    assert all(a.equal(b) for a, b in zip(tensors, wanted, strict=True))
    assert not all(a.equal(p.data) for a, p in zip(tensors, trained_parameters(first), strict=True))
    point_at(first, tensors)
    assert list(first.adapter_state()) == list(second.adapter_state())


def pairs_of_shared_and_alone(config: TrainConfig, folder: Path) -> list[tuple[Run, Run]]:
    """Every run twice: in one process with the others, and by itself; their metrics are equal."""
    shared, alone = (plan_runs(config, folder / name, "c.toml") for name in ("shared", "alone"))
    assert run_shared(shared) == dict.fromkeys((run.name for run in shared), 0)
    for one, other in zip(alone, shared, strict=True):
        prepare_folder(one)
        train(one.config, console=Console(io.StringIO()))
        assert rows_without_times(one.folder) == rows_without_times(other.folder)
    losses = [rows(run.folder)[-1]["loss"] for run in shared]
    assert len(set(losses)) == len(losses)
    return list(zip(shared, alone, strict=True))


@pytest.mark.slow
def test_shared_runs_equal_runs_alone_to_the_bit(model: Path, tmp_path: Path) -> None:
    for pair in pairs_of_shared_and_alone(config_with(model, tmp_path), tmp_path):
        for name in ("learner.safetensors", "adapter/adapter_model.safetensors"):
            a, b = (load_file(run.folder / "checkpoints" / "step_000004" / name) for run in pair)
            assert a.keys() == b.keys()
            assert all(a[key].equal(b[key]) for key in a)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, *slow(3)])
def test_how_often_steps_are_logged_does_not_change_the_turns(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    plain, trained = SharedBackend.train_step, []

    def train_step(self: SharedBackend, datums: Sequence[Datum], step: int) -> StepMetrics:
        trained.append((threading.current_thread().name, step))
        return plain(self, datums, step)

    monkeypatch.setattr(SharedBackend, "train_step", train_step)
    config = config_with(model, tmp_path, {"logging": {"every": every}}, seeds=[1], max_steps=3)
    runs = plan_runs(config, tmp_path / "shared", "c.toml")
    assert set(run_shared(runs).values()) == {0}
    assert trained == [(run.name, step) for step in range(3) for run in runs]


@pytest.mark.slow
def test_shared_runs_that_are_stopped_and_resumed_end_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(model, tmp_path, seeds=[1])
    whole = plan_runs(config, tmp_path / "whole", "c.toml")
    run_shared(whole)
    cut = plan_runs(config, tmp_path / "cut", "c.toml")
    with monkeypatch.context() as patch:
        patch.setattr(Host, "start", start_and_stop_after(2))
        assert set(run_shared(cut).values()) == {130}
    assert sum(len(rows(run.folder)) for run in cut) < 8
    assert run_shared(cut) == dict.fromkeys((run.name for run in cut), 0)
    for one, other in zip(whole, cut, strict=True):
        assert rows_without_times(one.folder) == rows_without_times(other.folder)


def start_and_stop_after(steps: int) -> Any:
    """A Host.start that stops all runs once so many steps are logged."""
    plain, logged = Host.start, threading.Semaphore(steps)

    def start(host: Host, folder: Path) -> None:
        leave = host.turns.leave

        def leave_and_count() -> None:
            if not logged.acquire(blocking=False):
                host.stop()
            leave()

        host.turns.leave = leave_and_count  # type: ignore[method-assign]
        plain(host, folder)

    return start


def test_a_shared_run_that_fails_leaves_the_others_alone(model: Path, tmp_path: Path) -> None:
    broken = MAXRL | {"reward": {"custom_module": "not_there"}}
    config = config_with(model, tmp_path, seeds=[1], conditions=[GRPO, broken, SEPA], max_steps=2)
    runs = plan_runs(config, tmp_path / "c", "c.toml")
    codes = run_shared(runs)
    assert [codes[run.name] for run in runs] == [0, 2, 0]
    assert "not_there" in (runs[1].folder / "stderr.log").read_text()


def test_a_run_whose_error_cannot_be_written_is_answered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: Host, folder: Path) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Host, "_train", fail)
    answers = io.StringIO()
    with pytest.raises(OSError, match="No space left"):
        Host(answers)._run(tmp_path / "one")
    assert json.loads(answers.getvalue()) == {"name": "one", "exit_code": 1}


@pytest.mark.parametrize("text", ["caf\u00e9", "\ud800"])
def test_an_error_with_any_characters_is_written_in_any_locale(tmp_path: Path, text: str) -> None:
    with _appending(tmp_path / "stderr.log") as errors:
        print(text, file=errors)
        assert errors.encoding == "utf-8"


def test_turns_go_round() -> None:
    turns, order = Turns(), []

    def work(name: str) -> None:
        with turns.turn():
            for _ in range(3):
                order.append(name)
                turns.leave()
                turns.take()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    turns.take()
    for thread in threads:
        thread.start()
    while len(turns.waiting) < 4:
        time.sleep(0.001)
    turns.leave()
    for thread in threads:
        thread.join(timeout=10)
    assert len(order) == 9
    assert order == 3 * order[:3]


@pytest.mark.parametrize(
    ("tables", "conditions", "words"),
    [
        ({"backend": {"devices": "cpu,cpu"}}, [GRPO, MAXRL], "needs the local backend on one device"),
        ({"backend": {"backend": "e2e.fakes.build"}}, [GRPO, MAXRL], "needs the local backend"),
        ({"inference": {"engine": "my.engine"}}, [GRPO, MAXRL], 'needs .inference. engine = "pytorch"'),
        ({}, [GRPO, GRPO | {"lora_rank": 8}], "model.lora_rank: .* has 8, grpo.none has 32"),
        ({}, [GRPO, GRPO | {"dropout": 0.5}], "lora.dropout: .* has 0.5"),
        ({}, [GRPO, GRPO | {"prefix_caching": False}], "inference.prefix_caching: .* has False"),
    ],
)
def test_runs_that_cannot_share_a_model_are_rejected_with_the_reason(
    tmp_path: Path, tables: dict[str, Any], conditions: list[dict[str, Any]], words: str
) -> None:
    config = campaign_config(
        tmp_path, {"backend": {"backend": "local", "devices": "cpu"}} | tables, conditions=conditions, share_model=True
    )
    with pytest.raises(ConfigError, match=words):
        plan_runs(config, tmp_path, "c.toml")
