from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain import cli
from retrain.checks.processes import check_multi_process, check_single_process
from retrain.config import build_config
from retrain.distributed import run
from retrain.distributed.balance import balance_datums, split_prompts
from retrain.distributed.build import find_device
from retrain.errors import ConfigError
from retrain.modeling.packing import length_of
from retrain.runtime.ranks import RankInfo, find_rank_info
from retrain.types import Datum


def test_a_process_finds_its_rank() -> None:
    assert find_rank_info({}) is None
    assert find_rank_info({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_rank_info({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2)
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_rank_info(env) == RankInfo(5, 8, 1, 4)


@pytest.mark.parametrize("env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_an_impossible_rank_is_rejected(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        find_rank_info(env)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("tables", "environment", "words"),
    [
        ({}, FSDP, "does not ask for FSDP, but accelerate's configuration does"),
        ({"fsdp": True}, FSDP | {"FSDP_VERSION": "1"}, "fsdp_version 1"),
        (
            {},
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "does not support DeepSpeed, which accelerate's configuration sets.  "
            "Try: fsdp = true, or `retrain grpo` for ZeRO",
        ),
        ({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "does not support gradient_accumulation_steps"),
        ({}, {"ACCELERATE_USE_MEGATRON_LM": "true"}, "does not support Megatron-LM"),
        ({"fsdp": True}, {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision 'fp16'"),
    ],
)
def test_the_configuration_of_accelerate_must_match_the_file(
    tables: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_multi_process(build_config({"distributed": tables}, {}, "run.toml"), environment)
    assert words in str(raised.value)


@pytest.mark.parametrize(("tables", "environment"), [({}, {}), ({"fsdp": True}, FSDP)])
def test_what_agrees_is_accepted(tables: dict[str, Any], environment: dict[str, str]) -> None:
    check_multi_process(build_config({"distributed": tables}, {}, "run.toml"), environment)


def test_sharding_over_one_process_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"needs several processes.  Try: retrain launch --processes 2"):
        check_single_process(build_config({"distributed": {"fsdp": True}}, {}, "run.toml"))


@pytest.mark.parametrize(
    ("devices", "gpus", "local", "expected"),
    [
        ("cpu", 8, (1, 2), "cpu"),
        ("auto", 0, (1, 2), "cpu"),
        ("auto", 8, (1, 2), "cuda:1"),
        ("gpu:0", 8, (3, 4), "cuda:3"),
        ("gpu:4,gpu:6", 8, (1, 2), "cuda:6"),
    ],
)
def test_a_rank_has_a_device_of_its_own(
    devices: str, gpus: int, local: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = build_config({"backend": {"devices": devices}}, {}, "run.toml")
    assert find_device(config, RankInfo(local[0], local[1], *local), lambda line: None) == torch.device(expected)


def test_ranks_on_a_machine_without_the_gpus_of_the_file_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = build_config({"backend": {"devices": "gpu:0"}}, {}, "run.toml")
    with pytest.raises(ConfigError, match="PyTorch finds no GPU here"):
        find_device(config, RankInfo(0, 2, 0, 2), lambda line: None)


@pytest.mark.parametrize(("devices", "gpus"), [("gpu:0", 2), ("gpu:0,gpu:1", 8), ("gpu:0,gpu:1,gpu:9", 8)])
def test_ranks_without_a_gpu_of_their_own_are_rejected(
    devices: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = build_config({"backend": {"devices": devices}}, {}, "run.toml")
    with pytest.raises(ConfigError, match=f"3 ranks on this machine need a GPU each, but it has {gpus}"):
        find_device(config, RankInfo(0, 3, 0, 3), lambda line: None)


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_prompt_has_one_rank_in_order(prompts: int, ranks: int) -> None:
    parts = [list(range(prompts))[part] for part in split_prompts(prompts, ranks)]
    assert [prompt for part in parts for prompt in part] == list(range(prompts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=40), st.integers(1, 6))
def test_every_datum_has_one_rank_and_none_has_much_more_than_its_share(
    sizes: list[tuple[int, int]], ranks: int
) -> None:
    datums = [_datum(prompt, length) for prompt, length in sizes]
    held = balance_datums(datums, ranks)
    assert sorted(id(datum) for part in held for datum in part) == sorted(map(id, datums))
    assert held[0]
    total, longest = sum(map(length_of, datums)), max(map(length_of, datums))
    # A greedy division is never worse than twice the even share and one more piece.
    assert max(sum(map(length_of, part)) for part in held) <= 2 * total / ranks + 2 * longest


def _datum(prompt: int, length: int) -> Datum:
    tokens = np.ones(length, np.int64)
    return Datum(np.full(3, prompt), tokens, tokens * 0.0, tokens * 1.0, tokens > 0)


def test_starter_files_are_written_and_accelerate_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["distributed", "init", "here", "--processes", "4"]) == 0
    loaded = {name: config_args.load_config_from_file(f"here/{name}.yaml") for name in ("ddp", "fsdp2")}
    assert {config.num_processes for config in loaded.values()} == {4}
    assert loaded["fsdp2"].fsdp_config["fsdp_version"] == 2
    assert "--nproc-per-node" in (tmp_path / "here" / "torchrun.sh").read_text()
    assert "srun" in (tmp_path / "here" / "slurm.sh").read_text()
    assert cli.run(["distributed", "init", "here"]) == 2
    assert "exists and was not changed" in capsys.readouterr().err


def test_an_impossible_folder_is_rejected_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.run(["distributed", "init", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_second_run_of_a_script_is_rejected_since_the_other_ranks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_ENDED", [0])
    with pytest.raises(ConfigError, match="the other ranks ended with the first run"):
        run.train_on_ranks(build_config({}, {}, "run.toml"), RankInfo(0, 2, 0, 2))
