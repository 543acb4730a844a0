"""The Tinker backend against SkyRL's Tinker server on the CPU, and in a virtual environment without PyTorch."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from backends.tinker_server import KEY, TinkerServer
from e2e.runs import rows, train_quietly

from retrain.builtin import resolve_model
from retrain.config import TrainConfig, load_config
from retrain.config.load import dump_config

from .conftest import Prepare
from .skyrl_process import SKYRL, skyrl

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# Everything that a run on this backend imports, and nothing that would bring PyTorch along.
LIGHT = [
    "tinker",
    "transformers",
    "numpy",
    "scipy",
    "click",
    "rich",
    "pydantic",
    "python-dotenv",
    "httpx",
    "jinja2",
    "safetensors",
]


@pytest.fixture(autouse=True)
def leaks_show_here() -> Iterator[None]:
    """The SDK leaves a connection open; it is to be found now, so that no other file's tests are blamed for it."""
    yield
    gc.collect()


def config_for(url: str, model: str, folder: Path, **overrides: Any) -> TrainConfig:
    small: dict[str, Any] = {
        "backend.backend": "tinker",
        "backend.throttle_dir": str(folder / "throttle"),
        "model.model": model,
        "model.base_url": url,
        "model.lora_rank": 8,
        "data.source": "arithmetic",
        "training.seed": 1,
        "training.max_steps": 3,
        "training.batch_size": 4,
        "training.group_size": 8,
        "training.max_tokens": 40,
        "training.temperature": 0.8,
        "training.lr": 2e-3,
        "training.save_every": 2,
        "reward.workers": 1,
        "logging.log_dir": str(folder / "logs"),
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})


def test_five_steps_with_a_resume_on_skyrl(side_venv: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = side_venv("skyrl", SKYRL)
    monkeypatch.setenv("TINKER_API_KEY", "tml-dummy")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = str(resolve_model("builtin:tiny"))
    with skyrl(python, model, tmp_path) as url:
        first, printed = train_quietly(config_for(url, model, tmp_path))
        assert "Training client ready." in printed
        resumed = config_for(url, model, tmp_path, training__max_steps=5, resume__from=first.log_dir)
        last, _ = train_quietly(resumed)
    logged_rows = rows(last.log_dir)
    assert [row["step"] for row in logged_rows] == [0, 1, 2, 3, 4]
    for row in logged_rows:
        # Both sides are raw, so temperature 0.8 does not show; what is left is rounding.
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio_max"] == pytest.approx(1.0, abs=1e-2)
        assert row["grad_norm"] > 0 and row["loss"] != 0
    assert last.weights.startswith("tinker://") and last.weights != first.weights


def test_a_run_in_an_environment_without_torch(
    side_venv: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = side_venv("no-torch", [["install", "-c", str(ROOT / "constraints.txt"), *LIGHT]])
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
    absent = subprocess.run([python, "-c", "import torch"], capture_output=True, env=environment, check=False)
    assert b"No module named 'torch'" in absent.stderr
    with TinkerServer(tmp_path / "exports", batching=True) as server:
        config = config_for(server.url, "builtin:tiny", tmp_path, eval__every=3, eval__max_examples=4)
        (tmp_path / "run.toml").write_text(dump_config(config))
        command = [python, "-m", "retrain", tmp_path / "run.toml"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training client ready." in done.stdout
    assert done.stderr == ""
    assert len(rows(tmp_path / "logs")) == 3
