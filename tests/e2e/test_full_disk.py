"""A disk that fills up: the run ends with a sentence and exit code 1, and what was saved is whole."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.cli import run

from .runs import fake_config, rows_without_times, run_command
from .tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), gain=1.5, layers=1))


def real_run(model: Path, folder: Path, **overrides: Any) -> Any:
    """Five steps of a real model that learns something."""
    settings: dict[str, Any] = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "model__lora_rank": 16,
        "training__max_tokens": 8,
        "training__max_steps": 5,
        "training__save_every": 1,
        "training__record": True,
        "reward__custom_function": "score_length",
    }
    return fake_config(model, folder, **settings | overrides)


@pytest.fixture(scope="module")
def uncut(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uncut")
    assert run_command(real_run(model, folder)) == 0
    return folder / "logs"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of its own; resize it with `resize`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    yield folder
    # Lazily: a failed test may still hold a file open there.
    subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.mark.parametrize(
    "share", [0.7, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.1, 0.3, 0.5, 0.9))]
)
def test_a_full_disk_ends_the_run_and_loses_nothing(
    model: Path, uncut: Path, disk: Path, tmp_path: Path, share: float, capfd: pytest.CaptureFixture[str]
) -> None:
    needed = sum(file.stat().st_blocks * 512 for file in uncut.rglob("*") if file.is_file())
    logs = disk / "logs"
    config = real_run(model, tmp_path, logging__log_dir=str(logs), data__path=str(uncut.parent / "problems.jsonl"))
    resize(disk, int(share * needed))
    capfd.readouterr()
    code = run_with(config, tmp_path)
    printed = capfd.readouterr().err
    assert code == 1
    assert "No space left on device" in printed
    assert "Earlier checkpoints are intact" in printed
    assert "Traceback" not in printed
    resize(disk, 64 << 20)
    if any(logs.glob("checkpoints/step_*/checkpoint.json")):
        assert f"retrain --resume {logs}" in printed
        assert run(["--resume", str(logs)]) == 0
    else:
        assert run_with(config, tmp_path) == 0
    assert rows_without_times(logs) == rows_without_times(uncut)
    last = "checkpoints/step_000005/learner.safetensors"
    assert (logs / last).read_bytes() == (uncut / last).read_bytes()


def run_with(config: Any, folder: Path) -> int:
    from retrain.config.load import dump_config

    (folder / "run.toml").write_text(dump_config(config))
    return run([str(folder / "run.toml")])


@pytest.mark.slow
def test_a_disk_that_is_full_at_a_resume_loses_nothing(
    model: Path, uncut: Path, disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = disk / "logs"
    settings = {"logging__log_dir": str(logs), "data__path": str(uncut.parent / "problems.jsonl")}
    assert run_with(real_run(model, tmp_path, training__max_steps=2, **settings), tmp_path) == 0
    before = (logs / "config.toml").read_text()
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    assert run(["--resume", str(logs), "--max-steps", "5"]) != 0
    assert "No space left on device" in capfd.readouterr().err
    assert (logs / "config.toml").read_text() == before
    (disk / "filler").unlink()
    assert run(["--resume", str(logs), "--max-steps", "5"]) == 0
    assert rows_without_times(logs) == rows_without_times(uncut)
