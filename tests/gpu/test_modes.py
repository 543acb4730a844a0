"""Whole runs on one GPU in every mode: campaigns that share a model, environments, split mode, no Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign.test_shared import config_with, pairs_of_shared_and_alone
from e2e.runs import rows_without_times, train_quietly

from .test_cuda import gpu_run

pytestmark = pytest.mark.gpu


def test_runs_that_share_a_model_equal_runs_alone(tiny: Path, tmp_path: Path) -> None:
    config = config_with(tiny, tmp_path, {"backend": {"backend": "local", "devices": "gpu:0"}}, seeds=[1])
    assert len(pairs_of_shared_and_alone(config, tmp_path)) == 2


def test_turns_of_an_environment_join_the_running_batch(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        settings: dict[str, Any] = {"environment__provider": "builtin", "environment__id": "guess-number"}
        config = gpu_run(Path("builtin:tiny"), folder, training__max_tokens=32, training__max_steps=3, **settings)
        train_quietly(config)
        found.append(rows_without_times(folder / "logs"))
    assert found[0] == found[1]
    assert all(row["ratio_mean"] is None or abs(row["ratio_mean"] - 1) < 0.1 for row in found[0])
    assert any(row["num_datums"] for row in found[0])


def test_split_mode_on_one_gpu_repeats_to_the_bit(tmp_path: Path) -> None:
    found = []
    # With a large learning rate, the check of log-probs would take one update for an error of the sampler.
    split: dict[str, Any] = {"backend__devices": "gpu:0,gpu:0", "training__lr": 1e-3}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        config = gpu_run(Path("builtin:tiny"), tmp_path / name, training__max_steps=4, **split)
        train_quietly(config)
        found.append(rows_without_times(tmp_path / name / "logs"))
    assert found[0] == found[1]
    assert [row["staleness"] for row in found[0]] == [0, 1, 1, 1]


def test_without_triton_a_run_is_eager_and_trains(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    hidden = "import sys; sys.modules['triton'] = None; from retrain.cli import main; main()"
    flags = ["run.toml", "--model", "builtin:tiny", "--devices", "gpu:0", "--data-source", "arithmetic"]
    flags += ["--max-steps", "2", "--batch-size", "2", "--group-size", "4", "--max-tokens", "16"]
    done = subprocess.run([sys.executable, "-c", hidden, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "eager (Triton is not installed)" in done.stdout
