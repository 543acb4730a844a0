"""Whole runs on one GPU in every mode: campaigns that share a model, and environments."""

from __future__ import annotations

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
