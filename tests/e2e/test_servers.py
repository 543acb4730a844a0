"""Whole runs that sample on a loopback server: they train, resume exactly, and end well when something goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_engine.loopback import Loopback

from retrain.cli import run
from retrain.config import TrainConfig
from retrain.errors import RolloutError

from .runs import fake_config, rows, rows_without_times, run_command, train_quietly
from .tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("served"), "qwen3"))


@pytest.fixture
def server(model: Path) -> Iterator[Loopback]:
    with Loopback(model) as running:
        yield running


def config_of(server: Loopback, folder: Path, **overrides: Any) -> TrainConfig:
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "inference__engine": "vllm",
        "inference__url": server.url,
        "inference__wait_s": 0.5,
        "model__lora_rank": 4,
        "training__lr": 3e-2,
        "training__max_tokens": 12,
        "training__temperature": 0.8,
        "reward__custom_function": "score_length",
    }
    return fake_config(server.model, folder, **own | overrides)


@pytest.mark.slow
def test_a_run_trains_through_a_server_and_proves_the_policy_at_every_step(server: Loopback, tmp_path: Path) -> None:
    result, printed = train_quietly(config_of(server, tmp_path))
    metrics = rows(result.log_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[0]["policy_proof"] is None
    for row in metrics[1:]:
        assert row["policy_proof"] == pytest.approx(1.0, abs=0.01)
    for row in metrics:
        assert row["staleness"] == 0
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio_max"] == pytest.approx(1.0, abs=0.02)
        assert row["mismatch_max"] < 1e-3
        assert row["mismatch_kl"] < 1e-6
    assert f"Inference server {server.url}: vllm, model tiny, context 256." in printed
    assert server.adapters == {}, "a run that is over leaves nothing on the server"


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_interrupted(server: Loopback, tmp_path: Path, ahead: int) -> None:
    whole, _ = train_quietly(config_of(server, tmp_path / "whole", training__async_steps=ahead))
    half = config_of(server, tmp_path / "cut", training__async_steps=ahead, training__max_steps=2)
    cut, _ = train_quietly(half)
    resumed = config_of(server, tmp_path / "cut", training__async_steps=ahead, resume__from=cut.log_dir)
    train_quietly(resumed)
    assert rows_without_times(whole.log_dir) == rows_without_times(cut.log_dir)


@pytest.mark.slow
def test_one_step_ahead_is_reported_as_one_step_stale(server: Loopback, tmp_path: Path) -> None:
    result, printed = train_quietly(config_of(server, tmp_path, training__async_steps=1))
    metrics = rows(result.log_dir)
    assert [row["staleness"] for row in metrics] == [0, 1, 1, 1]
    assert "(placeholder)" in printed
    # From step 1 on samples are one update old: their ratios are off one, which corrects for it.
    assert metrics[0]["ratio_max"] == pytest.approx(1.0, abs=0.02)
    assert max(row["ratio_max"] for row in metrics[1:]) > 1.001
    assert all(row["policy_proof"] == pytest.approx(1.0, abs=0.01) for row in metrics[2:])


@pytest.mark.slow
def test_a_swapped_adapter_stops_the_run_within_a_step_and_the_run_can_be_resumed(
    server: Loopback, tmp_path: Path
) -> None:
    config = config_of(server, tmp_path, training__max_steps=4)
    seen = 0

    def swap(body: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == 10:  # the first requests are the start-up's
            server.adapters["foreign"] = {
                name: torch.randn_like(tensor) * 0.3 for name, tensor in server.adapters[body["model"]].items()
            }
            server.serves_instead = "foreign"

    server.faults = [swap] * 100
    with pytest.raises(RolloutError, match="does not sample from the newest policy"):
        train_quietly(config)
    state = json.loads((Path(config.logging.log_dir) / "trainer_state.json").read_text())
    done = state["step"]
    assert state["status"] == "failed"
    assert 0 < done < 4
    server.serves_instead, server.faults = "", []
    result, _ = train_quietly(config_of(server, tmp_path, resume__from=config.logging.log_dir))
    assert [row["step"] for row in rows(result.log_dir)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_a_checkpoint_and_exit_code_one(
    server: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = train_quietly(config_of(server, tmp_path / "whole"))
    config = config_of(server, tmp_path / "cut")
    asked = len(server.asked)

    def die(body: dict[str, Any]) -> bytes | None:
        if len(server.asked) < asked + 8:
            return None
        server.down = True
        return b""

    server.faults = [die] * 100
    assert run_command(config) == 1
    printed = capsys.readouterr()
    assert "no inference server is available" in printed.err
    assert "retrain --resume" in printed.out + printed.err
    server.down, server.faults = False, []
    assert run(["--resume", config.logging.log_dir]) == 0
    assert rows_without_times(whole.log_dir) == rows_without_times(config.logging.log_dir), "no partial group was used"


def test_a_server_that_is_not_fit_is_wrong_input(
    server: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.loads_adapters = False
    assert run_command(config_of(server, tmp_path)) == 2
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in capsys.readouterr().err


def test_true_entropies_are_rejected_before_training(
    server: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(server, tmp_path, algorithm__uncertainty_kind="shannon_entropy")
    assert run_command(config) == 2
    assert 'engine = "vllm": A server returns no entropies' in capsys.readouterr().err


def test_prompts_that_do_not_fit_the_servers_context_are_rejected(
    server: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.context = 20
    assert run_command(config_of(server, tmp_path)) == 2
    assert "do not fit the model's context of 20" in capsys.readouterr().err
