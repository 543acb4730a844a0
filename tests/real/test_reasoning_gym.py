"""Tasks of the real reasoning-gym package, in a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.real.conftest import Prepare

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
# Beside the package itself, what retrain imports on the way to an environment; no model is loaded.
INSTALLS = [["install", "-q", "reasoning-gym==0.1.25", "numpy", "pydantic", "click", "python-dotenv", "rich", "httpx"]]


def test_its_tasks_are_asked_scored_and_refused_as_they_should_be(side_venv: Prepare) -> None:
    python = side_venv("reasoning_gym", INSTALLS)
    script = Path(__file__).with_name("play_reasoning_gym.py")
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-W", "ignore", script], capture_output=True, text=True, cwd=ROOT, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"
