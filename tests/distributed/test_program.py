"""Whole runs on several ranks: what they learn, what they leave behind, and how they end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from inference_engine.loopback import Loopback

from tests.distributed.programs import Break, metrics_in, run_program
from tests.e2e.tiny import write_model, write_tokenizer

EXACT = ("mean_reward", "correct_rate", "num_datums", "max_token_hit_rate", "running_correct_rate")
CLOSE = ("loss", "grad_norm", "ratio_mean", "exec_entropy_mean")


@pytest.mark.slow
def test_two_ranks_run_what_one_does_and_one_or_four_resume_it(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("alone", "two", "one", "four")}
    folders["alone"].mkdir()
    folders["two"].mkdir()
    code, printed, _ = run_program(1, folders["alone"], training__max_steps=4)
    assert code == 0, printed
    code, printed, _ = run_program(2, folders["two"], training__max_steps=2)
    assert code == 0, printed
    for name, world in (("one", 1), ("four", 4)):
        shutil.copytree(folders["two"], folders[name])
        log = str(folders[name] / "log")
        code, printed, _ = run_program(world, folders[name], training__max_steps=4, resume__from=log)
        assert code == 0, printed
    expected = metrics_in(folders["alone"])
    assert len(expected) == 4
    for name in ("one", "four"):
        found = metrics_in(folders[name])
        assert len(found) == 4
        for ours, theirs in zip(found, expected, strict=True):
            assert [ours[key] for key in EXACT] == [theirs[key] for key in EXACT]
            assert [ours[key] for key in CLOSE] == pytest.approx([theirs[key] for key in CLOSE], rel=1e-5, abs=1e-5)
    names = {path.name for path in (folders["two"] / "log" / "checkpoints" / "step_000002").rglob("*")}
    assert names == {path.name for path in (folders["alone"] / "log" / "checkpoints" / "step_000002").rglob("*")}


@pytest.mark.slow
def test_fsdp2_runs_the_program_and_a_single_process_resumes_it(tmp_path: Path) -> None:
    code, printed, _ = run_program(2, tmp_path, training__max_steps=2, distributed__fsdp=True, model__lora_rank=0)
    assert code == 0, printed
    log = str(tmp_path / "log")
    code, printed, _ = run_program(1, tmp_path, training__max_steps=3, model__lora_rank=0, resume__from=log)
    assert code == 0, printed
    assert len(metrics_in(tmp_path)) == 3


SLOW_BREAKS = [
    pytest.param(broken, marks=pytest.mark.slow, id=str(broken))
    for broken in (Break(1, "Train"), Break(1, "Sample"), Break(1, "Train", "kill"), Break(2, "Build", "kill"))
]


@pytest.mark.parametrize("broken", SLOW_BREAKS)
def test_a_rank_that_dies_ends_all_and_is_named_first(tmp_path: Path, broken: Break) -> None:
    code, printed, seconds = run_program(3, tmp_path, broken, training__max_steps=9)
    assert code == 1
    assert seconds < 60
    failure, _, rest = printed.partition(f"rank {broken.rank} (process ")[2].partition("error: ")
    assert "ValueError: broken on purpose" in failure or "ended without a message" in failure
    assert rest.startswith(f"rank {broken.rank} (process ")
    assert "Traceback" not in rest
    # Between steps the run's state is whole, and saved.
    assert (tmp_path / "log" / "checkpoints").exists() == (broken.command == "Sample")


@pytest.mark.slow
def test_an_error_on_rank_0_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ValueError: broken on purpose"):
        run_program(2, tmp_path, Break(0, "Train"), training__max_steps=9)


@pytest.mark.slow
def test_a_broken_reward_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bad_reward.py").write_text("def reward(response, reference, **_):\n    raise ValueError('no')\n")
    reward = {"reward__type": "custom", "reward__custom_module": "bad_reward", "reward__custom_function": "reward"}
    code, printed, _ = run_program(2, tmp_path, plugins__search_paths=[str(tmp_path)], **reward)
    assert code == 1
    assert "scoring failed for 16 of 16 completions" in printed
    assert (tmp_path / "log" / "checkpoints" / "step_000000").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "ddp"])
def test_an_interrupt_leaves_a_checkpoint(tmp_path: Path, fsdp: bool) -> None:
    strike = Break(0, "Train", "interrupt")
    code, printed, seconds = run_program(2, tmp_path, strike, training__max_steps=999, distributed__fsdp=fsdp)
    assert code == 130, printed
    assert seconds < 30
    assert "Interrupted. To resume: retrain launch --processes 2 --resume" in printed
    assert list((tmp_path / "log" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"distributed__fsdp": True, "distributed__gather_for_generation": False},
    ],
)
@pytest.mark.slow
def test_rank_0_samples_on_a_server_and_all_ranks_train(tmp_path: Path, sharded: dict[str, bool]) -> None:
    (tmp_path / "length_reward.py").write_text(
        "def reward(response, reference, **_):\n    return float(len(response) % 2)\n"
    )
    options = {
        "inference__engine": "vllm",
        "reward__type": "custom",
        "reward__custom_module": "length_reward",
        "reward__custom_function": "reward",
        "training__max_steps": 3,
        "training__lr": 1e-2,
    }
    with Loopback(write_tokenizer(write_model(tmp_path / "model", "qwen3"))) as server:
        options |= {"model__model": str(server.model), "inference__url": server.url}
        code, printed, _ = run_program(2, tmp_path, plugins__search_paths=[str(tmp_path)], **options, **sharded)
    assert code == 0, printed
    metrics = metrics_in(tmp_path)
    assert [row["policy_proof"] for row in metrics[1:]] == pytest.approx([1.0, 1.0], abs=0.01)
    assert all(row["grad_norm"] > 0 and row["ratio_max"] == pytest.approx(1.0, abs=0.02) for row in metrics)
    assert "Engine" not in (tmp_path / "rank_1.txt").read_text()
