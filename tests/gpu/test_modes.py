"""Whole runs on one GPU in every mode: campaigns that share a model, and environments."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from campaign.test_shared import config_with, run_shared
from e2e.runs import rows, rows_without_times, train_quietly

from retrain.campaign.plan import plan_runs
from retrain.campaign.processes import prepare_folder
from retrain.tracking.console import Console
from retrain.trainer import train

from .test_cuda import gpu_run

pytestmark = pytest.mark.gpu


def test_runs_that_share_a_model_equal_runs_alone(tiny: Path, tmp_path: Path) -> None:
    config = config_with(tiny, tmp_path, {"backend": {"backend": "local", "devices": "gpu:0"}}, seeds=[1])
    shared = plan_runs(config, tmp_path / "shared", "c.toml")
    alone = plan_runs(config, tmp_path / "alone", "c.toml")
    assert run_shared(shared) == dict.fromkeys((run.name for run in shared), 0)
    for one, other in zip(alone, shared, strict=True):
        prepare_folder(one)
        train(one.config, console=Console(io.StringIO()))
        assert rows_without_times(one.folder) == rows_without_times(other.folder)
    assert len({rows(run.folder)[-1]["loss"] for run in shared}) == len(shared)


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
