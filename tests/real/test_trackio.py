"""A run that logs to the real Trackio, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from .conftest import Prepare

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from retrain.config import load_config
from retrain.tracking.background import BackgroundTracker
from retrain.tracking.trackio import TrackioTracker
from retrain.types import Completion, Example, Group, Score
import numpy as np

config = load_config(None, {"logging.trackio_project": "tests", "logging.wandb_run_name": "grpo+none_s7",
                            "logging.wandb_group": "grpo+none", "logging.log_completions": True})
answers = tuple(Completion(np.arange(2), np.zeros(2), text, "stop") for text in ("four", "five"))
scores = (Score(1.0, "right"), Score(0.0, "wrong"))
group = Group(Example("2 + 2?", "4"), np.arange(3), answers, scores, np.array([0.5, -0.5]))
for step in range(2):
    tracker = BackgroundTracker("trackio", TrackioTracker(Path(".")), print)
    tracker.start(config)
    tracker.log(step, {"loss": 0.5 + step, "mean_reward": 0.25, "bp_p_star": None, "condition": "grpo+none"}, [group])
    tracker.finish()

from trackio.sqlite_storage import SQLiteStorage

(name,) = SQLiteStorage.get_runs("tests")
print("ROWS", json.dumps({"name": name, "rows": SQLiteStorage.get_logs("tests", name)}, default=str))
"""


@pytest.mark.timeout(300)
def test_a_run_and_its_resume_are_one_run_in_trackio(tmp_path: Path, side_venv: Prepare) -> None:
    python = side_venv("trackio", [["install", "trackio"]])
    paths = (ROOT, sysconfig.get_path("purelib"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    done = subprocess.run(
        [python, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ROWS "))[5:])
    assert found["name"] == "grpo+none_s7"
    assert [row["train/loss"] for row in found["rows"]] == [0.5, 1.5]
    assert {row["train/rewards/mean_reward"] for row in found["rows"]} == {0.25}
    assert "train/backpressure/p_star" not in found["rows"][0]
    table = found["rows"][0]["completions"]
    assert [(row["completion"], row["reward"], row["advantage"]) for row in table["_value"]] == [
        ("four", 1.0, 0.5),
        ("five", 0.0, -0.5),
    ]
