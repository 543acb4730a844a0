"""A report's curves as PNG files, drawn by the real matplotlib."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.report.folders import write_run

from .conftest import Prepare

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def draw(folder: Path, side_venv: Prepare) -> subprocess.CompletedProcess[str]:
    python = side_venv("plots", [["install", "matplotlib>=3.9", "-c", str(ROOT / "constraints.txt")]])
    paths = os.pathsep.join(map(str, (ROOT, sysconfig.get_path("purelib"))))
    return subprocess.run(
        [python, "-m", "retrain", "report", "runs", "--png", "figures"],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_every_curve_that_has_values_becomes_a_picture(tmp_path: Path, side_venv: Prepare) -> None:
    for mode in ("grpo", "maxrl"):
        for seed in (1, 2):
            write_run(tmp_path / "runs" / f"{mode}_s{seed}", seed, mode)
    done = draw(tmp_path, side_venv)
    assert done.returncode == 0, done.stderr
    drawn = {path.stem: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert drawn.keys() == {"correct_rate", "mean_reward", "eval_pass_at_1"}
    assert all(data.startswith(b"\x89PNG") and len(data) > 5000 for data in drawn.values())
    assert draw(tmp_path, side_venv).returncode == 0, "its own are replaced"
    (tmp_path / "figures" / "loss.png").write_bytes(b"mine")
    refused = draw(tmp_path, side_venv)
    assert refused.returncode == 2 and "loss.png does not say that retrain drew it, and stays" in refused.stderr
    assert (tmp_path / "figures" / "loss.png").read_bytes() == b"mine"


@pytest.mark.timeout(600)
def test_many_runs_of_one_condition_leave_room_for_the_curves(tmp_path: Path, side_venv: Prepare) -> None:
    for number in range(13):
        write_run(tmp_path / "runs" / ("folder_with_a_long_name_" * 5 + str(number)), 1, "grpo")
    done = draw(tmp_path, side_venv)
    assert (done.returncode, done.stderr) == (0, ""), "no warning that the axes collapsed"
