"""The benchmark scripts run where they can, and say what they need where they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_the_memory_benchmark_says_that_it_needs_a_gpu() -> None:
    done = run_script("memory.py")
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr


@pytest.mark.slow
def test_the_roofline_runs_on_the_cpu_and_sets_a_measured_step_against_it(tmp_path: Path) -> None:
    data = {"workload": "w4", "rows": {"retrain": {"sample_s": 1e6, "train_s": 2e6, "step_s": 3e6, "tokens": 1024}}}
    (tmp_path / "step.json").write_text(json.dumps(data))
    done = run_script("roofline.py", "--device", "cpu", "--measured", str(tmp_path / "step.json"))
    assert done.returncode == 0, done.stderr
    for words in (
        "w4 on CPU",
        "decode",
        "train backward",
        "optimizer",
        "adapter folding",
        "step took 3000000.000 s, 0%",
    ):
        assert words in done.stdout
