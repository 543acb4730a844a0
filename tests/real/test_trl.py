"""The scripts of tests/grpo are scripts for TRL: the real one runs them as they stand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from retrain.builtin import resolve_model

from .conftest import Prepare

pytestmark = pytest.mark.real

SCRIPTS = Path(__file__).parents[1] / "grpo" / "scripts"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("length", ["rewards 3 True"]),
        ("chat", ["steps 3 3 logged True True", "evaluated True True"]),
        ("adapter", ["steps 4 kl True"]),
    ],
)
def test_a_script_runs_with_trl_itself(script: str, printed: list[str], tmp_path: Path, side_venv: Prepare) -> None:
    python = side_venv("trl", [["install", "torch==2.13.0"], ["install", "trl==1.16.0", "peft"]])
    command = [python, SCRIPTS / f"{script}.py", resolve_model("builtin:tiny"), tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout.splitlines() for line in printed), done.stdout
