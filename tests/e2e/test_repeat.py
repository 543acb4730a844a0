"""One file and one seed give one result, with several threads on a busy machine, killed and resumed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "repeat.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("threads", [2, 4])
def test_eight_runs_under_load_of_which_two_are_killed_give_one_result(threads: int) -> None:
    command = [sys.executable, str(SCRIPT), "--runs", "8", "--kill", "2", "--threads", str(threads), "--steps", "5"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"GOMP_SPINCOUNT": "10000"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{threads} threads: 1 result(s)" in done.stdout
