"""A server that the run starts: with which flags, on which device, and that it ends however the run does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.runs import fake_config, rows, train_quietly
from e2e.tiny import config_for, policy_for, write_model, write_tokenizer
from waiting import wait_for

from retrain.config import TrainConfig
from retrain.config.load import dump_config
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine.http import launch

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("launched"), "qwen3"))


# How the stand-in is called: STAND_IN in the environment has it die at the start, or never listen.
COMMAND = f"""#!/bin/sh
if [ "$STAND_IN" ]; then
    echo "{{\\"pids\\": [$$]}}"
    echo "ValueError: there is no such thing as luck"
    [ "$STAND_IN" = hang ] || exit 3
    sleep 600
fi
exec {sys.executable} -m inference_engine.stand_in "$@"
"""


@pytest.fixture
def with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `vllm` command on the search path."""
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS}")


def config_of(model: Path, folder: Path, **overrides: Any) -> TrainConfig:
    own = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "inference__engine": "vllm",
        "inference__launch": True,
        "inference__launch_device": "cpu",
        "inference__wait_s": 60.0,
        "model__lora_rank": 4,
        "training__max_tokens": 12,
        "reward__custom_function": "score_length",
    }
    return fake_config(model, folder, **own | overrides)


def started(folder: Path) -> dict[str, Any]:
    """What the stand-in wrote down."""
    lines = (folder / "logs" / "vllm.log").read_text().splitlines()
    # Libraries may have printed something before.
    started_with: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return started_with


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(folder: Path) -> None:
    wait_for(lambda: not any(map(is_running, started(folder)["pids"])), 20.0)


@pytest.mark.slow
def test_a_run_trains_on_its_own_server_which_ends_with_it(with_vllm: None, model: Path, tmp_path: Path) -> None:
    result, printed = train_quietly(config_of(model, tmp_path, inference__max_model_len=200))
    assert [row["step"] for row in rows(result.log_dir)] == [0, 1, 2, 3]
    assert rows(result.log_dir)[-1]["policy_proof"] == pytest.approx(1.0, abs=0.01)
    assert f"its log is {tmp_path / 'logs' / 'vllm.log'}" in printed
    assert "recomputed" not in printed
    started_with = started(tmp_path)
    flags = " ".join(started_with["flags"])
    assert flags.startswith(f"serve {model} --host 127.0.0.1 --enable-lora --max-lora-rank 8 ")
    assert "--logprobs-mode processed_logprobs --dtype float32" in flags
    assert "--max-model-len 200" in flags
    assert started_with["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert_gone(tmp_path)


def test_a_server_that_dies_at_the_start_is_reported_with_its_last_lines(
    with_vllm: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "die")
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"exited with code 3. The last lines of .*vllm.log:\n(.*\n)*.*no such th"):
        train_quietly(config_of(model, tmp_path, inference__wait_s=600.0))
    assert time.monotonic() - began < 60
    assert_gone(tmp_path)


def test_a_server_that_never_answers_is_ended_after_the_wait(
    with_vllm: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "hang")
    with pytest.raises(ConfigError, match=r"no server responds at .* after 1 s .*Try: see .*vllm\.log; .*wait_s"):
        train_quietly(config_of(model, tmp_path, inference__wait_s=1.0))
    assert_gone(tmp_path)


@pytest.mark.slow
def test_a_server_that_dies_on_the_way_ends_the_run_with_a_checkpoint(
    with_vllm: None, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, tmp_path, training__max_steps=500)
    log = Path(config.logging.log_dir) / "metrics.jsonl"

    def kill_after_a_step() -> None:
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2)
        os.kill(started(tmp_path)["pids"][0], signal.SIGKILL)

    thread = threading.Thread(target=kill_after_a_step)
    thread.start()
    with pytest.raises(RolloutError, match="the vLLM server that this run started exited with code 137"):
        train_quietly(config)
    thread.join()
    state = json.loads((Path(config.logging.log_dir) / "trainer_state.json").read_text())
    assert state["status"] == "failed"
    assert_gone(tmp_path)


@pytest.mark.slow
def test_a_trainer_that_is_killed_takes_its_server_along(with_vllm: None, model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, training__max_steps=500)
    (tmp_path / "run.toml").write_text(dump_config(config))
    log = Path(config.logging.log_dir) / "metrics.jsonl"
    trainer = subprocess.Popen(
        [sys.executable, "-m", "retrain", str(tmp_path / "run.toml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: log.exists() and log.stat().st_size > 0)
    assert all(map(is_running, started(tmp_path)["pids"]))
    trainer.kill()
    trainer.wait(60)
    assert_gone(tmp_path)


def test_without_the_command_the_error_says_how_to_install_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no vllm command in this environment.*pip install vllm"):
        train_quietly(config_of(model, tmp_path))


@pytest.mark.parametrize(
    ("wanted", "trains", "gpus", "chosen"),
    [
        ("auto", "cpu", 0, "cpu"),
        ("auto", "cpu", 2, "cuda:0"),
        ("auto", "cuda:0", 2, "cuda:1"),
        ("auto", "cuda:1", 2, "cuda:0"),
        ("cpu", "cuda:0", 2, "cpu"),
        ("cuda:0", "cuda:0", 1, "cuda:0"),
    ],
)
def test_a_device_is_chosen(wanted: str, trains: str, gpus: int, chosen: str) -> None:
    assert launch.choose_device(wanted, torch.device(trains), gpus) == chosen


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [
        ("auto", 1, 'used for training.*launch_device = "cuda:0" and a gpu_mem'),
        ("cuda:2", 2, "does not exist: 2 GPUs found"),
    ],
)
def test_a_device_that_is_not_available_is_rejected(wanted: str, gpus: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        launch.choose_device(wanted, torch.device("cuda:0"), gpus)


def test_a_gpu_that_trains_is_shared_only_where_there_is_room_for_both() -> None:
    gib = 2.0**30
    # 80 GiB, of which 72 are free; a server with 0.5 takes 40 and leaves 32.
    assert launch.problem_with_room(80 * gib, 72 * gib, 0.5, 12 * gib) == ""
    message = launch.problem_with_room(80 * gib, 72 * gib, 0.9, 12 * gib)
    assert "of 80.0 GiB the trainer's model leaves 72.0" in message
    assert "would take 0.9 × 80.0 = 72.0, and a training step needs about 12.0" in message
    # (72 - 12) / 80
    assert "Try: gpu_memory_utilization = 0.75, or another launch_device" in message
    assert launch.problem_with_room(80 * gib, 72 * gib, 0.75, 12 * gib) == ""
    assert launch.problem_with_room(80 * gib, 8 * gib, 0.9, 12 * gib).endswith("Try: another launch_device")


def test_the_room_is_worked_out_from_the_model_and_the_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(model, inference__engine="vllm", inference__launch=True)
    policy = policy_for(config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 2**30, 40 * 2**30))
    with pytest.raises(
        ConfigError, match=r"is also used for training, and .* 0.9 × 40.0 = 36.0, and a training step needs about"
    ):
        launch.check_gpu_room(policy, config)
    roomy = config.inference.model_copy(update={"gpu_memory_utilization": 0.5})
    launch.check_gpu_room(policy, config.model_copy(update={"inference": roomy}))


def test_a_gpu_goes_by_its_number_among_those_that_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.environment_for("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert launch.environment_for("cuda:1")["CUDA_VISIBLE_DEVICES"] == "6"
    assert "CUDA_VISIBLE_DEVICES" not in launch.environment_for("cpu")


@pytest.mark.parametrize(("rank", "flag"), [(1, "8"), (8, "8"), (9, "16"), (300, "320")])
def test_the_rank_is_one_that_vllm_takes(with_vllm: None, model: Path, tmp_path: Path, rank: int, flag: str) -> None:
    config = config_of(model, tmp_path, model__lora_rank=rank, inference__gpu_memory_utilization=0.5)
    command = launch.command_for(config, policy_for(config, trained=False), "cuda:1")
    assert command[command.index("--max-lora-rank") + 1] == flag
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.5"


def test_a_rank_beyond_all_of_vllms_is_rejected(with_vllm: None, model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, model__lora_rank=513)
    with pytest.raises(ConfigError, match=r"lora_rank = 513 is more than vLLM supports.*512"):
        launch.command_for(config, policy_for(config, trained=False), "cpu")
