"""The launcher over small scripts in the ranks' place, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from retrain import cli
from retrain.distributed import launch as launching
from retrain.distributed.launch import Ranks

# Every script begins with its rank.
RANK = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "TERMINATE_AFTER_S", 1.0)
    monkeypatch.setattr(launching, "KILL_AFTER_S", 2.5)


def watch(script: str, folder: Path, processes: int = 3) -> tuple[int, Ranks, float]:
    ranks = Ranks(processes, [sys.executable, "-c", RANK + script], folder)
    started = time.monotonic()
    code = ranks.watch()
    assert all(process.poll() is not None for process in ranks.processes)
    return code, ranks, time.monotonic() - started


def test_the_exit_code_is_rank_0s_and_the_others_output_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, ranks, _ = watch("print('rank', rank, os.environ['WORLD_SIZE']); sys.exit(2 if rank == 0 else 0)", tmp_path)
    assert code == 2
    assert capfd.readouterr().out == "rank 0 3\n"
    assert ranks.log_of(2).read_text() == "rank 2 3\n"


def test_a_rank_that_dies_before_rank_0_knows_it_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, seconds = watch("if rank == 1: raise ValueError('no device')\ntime.sleep(600)", tmp_path)
    assert code == 1
    assert seconds < 20
    error = capfd.readouterr().err
    assert error.lstrip().startswith("Rank 1 ended with exit code 1. Its last output:\nTraceback")
    assert "ValueError: no device" in error


def test_a_rank_that_hangs_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    code, ranks, seconds = watch(f"{deaf}time.sleep(600)", tmp_path)
    assert code == 1
    assert seconds < 20
    assert ranks.processes[0].returncode == -signal.SIGKILL
    assert "Rank 1 was ended by SIGKILL" in capfd.readouterr().err


def test_a_killed_rank_0_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, _ = watch("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(600)", tmp_path)
    assert code == 1
    assert "rank 0 was ended by SIGKILL" in capfd.readouterr().err


def test_a_signal_before_rank_0_handles_any_interrupts_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "TERMINATE_AFTER_S", 60.0)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank else None\ntime.sleep(600)"
    ranks = Ranks(2, [sys.executable, "-c", RANK + deaf], tmp_path)
    threading.Timer(0.5, lambda: ranks.forward(signal.SIGTERM, None)).start()
    started = time.monotonic()
    assert ranks.watch() == 130
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err == "Interrupted.\n"


def test_signals_reach_rank_0_alone(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\nprint('ready', flush=True)\n"
    ranks = Ranks(2, [sys.executable, "-c", RANK + script + "time.sleep(600 if rank == 0 else 2)"], tmp_path)
    previous = signal.signal(signal.SIGINT, ranks.forward)
    try:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        assert ranks.watch() == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ranks.processes[1].returncode in (0, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[backend]\nbackend = "tinker"\n', "trains elsewhere; one process is enough"),
        (
            '[inference]\nengine = "vllm"\n[training]\nasync_steps = 1\n',
            "[training] async_steps is not supported with several",
        ),
        ("[campaign]\n", "[campaign] starts its own processes"),
        ("[training]\nlr = -1.0\n", "[training] lr must be > 0"),
        ("[distributed]\nzero_stage = 3\n", "[distributed] zero_stage was removed"),
        ("[distributed]\nfsdp = true\ngather_for_generation = false\n", 'engine "pytorch" samples from'),
    ],
)
def test_what_several_processes_cannot_run_is_rejected_before_they_start(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert cli.run(["launch", "--processes", "2", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["launch", "x.toml"], ["launch", "--processes", "1", "x.toml"]])
def test_one_process_needs_no_launcher(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert "--processes" in capsys.readouterr().err


@pytest.mark.slow
def test_retrain_launch_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.distributed.programs import metrics_in, write_config

    config = write_config(tmp_path, {"training.max_steps": 2})
    assert cli.run(["launch", "--processes", "2", str(config), "--max-steps", "1"]) == 0
    assert "Done: 1 step" in capfd.readouterr().out
    assert len(metrics_in(tmp_path)) == 1
    assert "Loading train model" in (tmp_path / "log" / "ranks" / "rank_1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--mixed_precision", "no"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_other_launchers_train_too(tmp_path: Path, launcher: list[str]) -> None:
    import subprocess

    from tests.distributed.programs import metrics_in, write_config

    config = write_config(tmp_path, {"training.max_steps": 1})
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "retrain", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(metrics_in(tmp_path)) == 1


@pytest.mark.slow
def test_fsdp_under_accelerate_trains_the_weights_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves zeros in the other ranks' weights if accelerate's configuration asks for FSDP."""
    from tests.distributed.programs import metrics_in, write_config

    monkeypatch.chdir(tmp_path)
    assert cli.run(["distributed", "init"]) == 0
    settings = Path("distributed/fsdp2.yaml")
    text = re.sub(r"(num_processes:) \d+", r"\1 2", settings.read_text()).replace("use_cpu: false", "use_cpu: true")
    settings.write_text(text)
    config = write_config(tmp_path, {"training.max_steps": 1, "distributed.fsdp": True})
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(settings)]
    done = subprocess.run([*launcher, "-m", "retrain", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = metrics_in(tmp_path)
    assert abs(row["ratio_mean"] - 1) < 0.01, "sampler and trainer have the same weights"


def test_the_folder_of_a_killed_launcher_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with subprocess.Popen(["sleep", "60"]) as other:
        folders = [tmp_path / "tmp" / f"retrain-ranks-{pid}-abc" for pid in (2**22 + 1, other.pid)]
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "rank_1.log").write_text("")
        monkeypatch.setattr(launching, "CHILD", ("-c", "import sys; sys.exit(3)"))
        assert launching.launch(2, [], tmp_path / "logs") == 3
        other.kill()
    assert list((tmp_path / "tmp").iterdir()) == [folders[1]]


@pytest.mark.parametrize(("code", "written"), [(2, []), (1, ["ranks"])])
def test_ranks_that_are_refused_leave_the_log_folder_as_it_is(
    code: int, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "CHILD", ("-c", f"import sys; sys.exit({code})"))
    assert launching.launch(2, [], tmp_path) == code
    assert [path.name for path in tmp_path.iterdir()] == written
