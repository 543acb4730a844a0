"""The real DeepSpeed with its CPU accelerator: two processes, gloo between them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from .conftest import Prepare

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
# Its other requirements are this environment's own.
INSTALLS = [
    [
        "install",
        "--no-deps",
        "deepspeed==0.19.8",
        "einops==0.8.2",
        "hjson==3.1.0",
        "ninja==1.13.2",
        "py-cpuinfo==9.0.0",
    ],
    ["install", "setuptools"],
]


@pytest.mark.timeout(1800)
def test_zero_takes_the_steps_of_a_single_process(tmp_path: Path, side_venv: Prepare) -> None:
    python = side_venv("deepspeed", INSTALLS)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, sysconfig.get_path("purelib")))),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "RANKS_PATIENCE_S": "600",
        # DeepSpeed compiles a kernel here the first time; a lock that a killed process left would stop it for ever.
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    done = subprocess.run(
        [python, "-m", "tests.real.zero_ranks", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.isupper()][-2:] == ["SAME RUNS", "NO HANG"]
