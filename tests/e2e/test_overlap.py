"""Overlapped steps of whole runs: the same training as sequential ones, and repeatable whatever arrives first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_engine.loopback import Loopback
from safetensors.torch import load_file

from retrain.backends.local.learner import Learner, Part
from retrain.errors import ConfigError, RolloutError
from retrain.types import Datum
from tests.cases import slow

from .runs import fake_config, rows, rows_without_times, train_quietly
from .tiny import write_model, write_tokenizer

ON = "Steps are overlapped: groups are trained on while others are still being sampled."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("served"), "qwen3"))


@pytest.fixture
def server(model: Path) -> Iterator[Loopback]:
    with Loopback(model) as running:
        yield running


def run(server: Loopback, folder: Path, **overrides: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], str]:
    """A run's rows, its adapter, and what it printed."""
    folder.mkdir()
    own = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "inference__engine": "vllm",
        "inference__url": server.url,
        "inference__wait_s": 0.5,
        "model__lora_rank": 4,
        "training__lr": 1e-3,
        "training__max_steps": 3,
        "training__batch_size": 4,
        "training__max_tokens": 12,
        "training__temperature": 0.8,
        "reward__custom_function": "score_length",
    }
    result, printed = train_quietly(fake_config(server.model, folder, **own | overrides))
    adapter = load_file(str(folder / "adapter" / "adapter_model.safetensors"))
    return rows_without_times(result.log_dir), adapter, printed


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def dawdle(seed: int, most_s: float = 0.15) -> list[Callable[[dict[str, Any]], None]]:
    """Faults that delay each reply by another time."""
    rng = random.Random(seed)
    return [lambda body: time.sleep(rng.uniform(0, most_s))] * 1000


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        pytest.param({"training__batch_size": 10, "training__max_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"training__prompts_per_sampling": 3}, marks=pytest.mark.slow),
        pytest.param({"training__resample_dead_groups": 2}, marks=pytest.mark.slow),
        pytest.param({"kl__beta": 0.1}, marks=pytest.mark.slow),
        pytest.param({"loss__type": "grpo", "algorithm__advantage_mode": "grpo"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_overlapped_run_is_the_sequential_one_up_to_rounding(
    server: Loopback, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    sequential, expected, said = run(server, tmp_path / "sequential", training__overlap=False, **overrides)
    assert "Steps are" not in said
    server.faults = dawdle(0)
    overlapped, found, printed = run(server, tmp_path / "overlapped", **overrides)
    assert ON in printed
    for ours, theirs in zip(overlapped, sequential, strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-3, abs=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reported", ["sampled", *slow("raw")])
def test_an_overlapped_run_repeats_to_the_bit_whatever_arrives_first(
    server: Loopback, tmp_path: Path, reported: str
) -> None:
    server.meaning = reported
    runs = []
    for seed in range(2):
        server.faults = dawdle(seed)
        runs.append(run(server, tmp_path / str(seed)))
    (first, weights, printed), (second, others, _) = runs
    assert ON in printed
    assert first == second
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_complete_groups_are_trained_on_while_the_last_one_is_still_sampled(
    server: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, first, waited = threading.Event(), threading.Lock(), list[bool]()
    compute = Learner.compute_part

    def watch(self: Learner, datums: Sequence[Datum]) -> Part:
        trained.set()
        return compute(self, datums)

    def hold_back(body: dict[str, Any]) -> None:
        if body["max_tokens"] == 12 and first.acquire(blocking=False):
            waited.append(trained.wait(20))

    monkeypatch.setattr(Learner, "compute_part", watch)
    server.faults = [hold_back] * 100
    run(server, tmp_path / "run", training__max_steps=1)
    assert waited == [True]


@pytest.mark.slow
def test_a_step_that_is_rejected_at_its_end_was_not_trained_on(server: Loopback, tmp_path: Path) -> None:
    every_step = {"training__save_every": 1, "training__keep": 9}
    run(server, tmp_path / "whole", **every_step)
    asked = len(server.asked) + 6

    def swap(body: dict[str, Any]) -> None:
        if len(server.asked) > asked and body["n"] == 4 and not server.serves_instead:
            server.adapters["foreign"] = {
                name: torch.randn_like(tensor) * 0.3 for name, tensor in server.adapters[body["model"]].items()
            }
            server.serves_instead = "foreign"

    server.faults = [swap] * 1000
    with pytest.raises(RolloutError, match="does not sample from the newest policy"):
        run(server, tmp_path / "cut", **every_step)
    done = len(rows(tmp_path / "cut" / "logs"))
    assert 0 < done < 3
    kept = f"logs/checkpoints/step_{done:06d}/learner.safetensors"
    before, after = (load_file(str(tmp_path / name / kept)) for name in ("whole", "cut"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_steps_on_one_device_are_sequential_and_the_reason_is_printed(model: Path, tmp_path: Path) -> None:
    own = {"backend__backend": "local", "backend__devices": "cpu", "model__lora_rank": 4, "training__max_steps": 1}
    config = fake_config(model, tmp_path, **own, training__max_tokens=8, reward__custom_function="score_length")
    _, printed = train_quietly(config)
    assert "Steps are sequential: the engine returns the completions of a step together.\n" in printed


def test_what_cannot_be_overlapped_is_an_error_if_it_is_asked_for(server: Loopback, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overlap = true is not possible: \[lora\] dropout"):
        run(server, tmp_path / "dropout", training__overlap=True, lora__dropout=0.1)
    with pytest.raises(ConfigError, match="overlap = true is not possible: this backend trains on complete steps"):
        run(server, tmp_path / "ahead", training__overlap=True, training__async_steps=1)
