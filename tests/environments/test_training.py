"""Whole runs on environments: the configuration of the README, the built-in model, rows from a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.hub_server import LoopbackHub, dataset_files

PACKAGES = Path(__file__).parent / "packages" / "v1"

ROWS = [
    {"question": f"{a}+{b}-{c}=?", "answer": f"First {a}+{b}={a + b}.\n#### {a + b - c}"}
    for a in range(5, 9)
    for b in range(1, 5)
    for c in range(1, 3)
]

TOML = """
[backend]
devices = "cpu"
adapter_path = "adapter"
[model]
model = "builtin:tiny"
lora_rank = 8
[training]
max_steps = {steps}
batch_size = 4
group_size = 4
max_tokens = 48
seed = 1
lr = 1e-3
[plugins]
search_paths = ["{packages}"]
[logging]
log_dir = "{logs}"
"""
GSM8K = """
[environment]
provider = "verifiers"
id = "primeintellect/gsm8k"           # installed env id
args = { split = "train" }             # native TOML object
auto_install = true                    # install from Prime Hub if missing
max_turns = 8                          # only used for multi-turn envs
[eval]
every = 10
max_examples = 8
"""
WORDLE = """
[environment]
provider = "verifiers"
id = "primeintellect/wordle"
max_turns = 3
"""


def run(folder: Path, tables: str, steps: int, logs: str = "logs", **environment: str) -> str:
    (folder / "run.toml").write_text(TOML.format(steps=steps, packages=PACKAGES, logs=logs) + tables)
    done = subprocess.run(
        [sys.executable, "-m", "retrain", "run.toml"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ten_steps_on_gsm8k_with_rows_from_a_hub(tmp_path: Path) -> None:
    files = dataset_files({"main": {"train": ROWS[0::2], "test": ROWS[1::2]}})
    with LoopbackHub({"openai/gsm8k": files}) as hub:
        printed = run(tmp_path, GSM8K, 10, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hub"), no_proxy="127.0.0.1")
    assert "Warning: the environment's default split is 'test'; using 'train'" in printed
    steps = read(tmp_path / "logs" / "metrics.jsonl")
    assert len(steps) == 10
    for step in steps:
        assert step["env/correct"] == step["correct_rate"]
        assert (step["turns"], step["rollout_errors"], step["env_forks"]) == (1.0, 0, 0)
        # Tokens went to the engine and came back as they are: the trainer gives them the same probabilities.
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert len(read(tmp_path / "logs" / "eval.jsonl")) == 2


@pytest.mark.slow
def test_a_multi_turn_run_repeats_to_the_bit(tmp_path: Path) -> None:
    for logs in ("one", "two"):
        run(tmp_path, WORDLE, 3, logs)
    one, two = ((tmp_path / logs / "emergence" / "generations.jsonl").read_text() for logs in ("one", "two"))
    assert one == two
    steps = read(tmp_path / "one" / "metrics.jsonl")
    assert all(1.0 <= step["turns"] <= 3.0 and step["rollout_errors"] == 0 for step in steps)
    assert all(step["ratio_max"] == pytest.approx(1.0, abs=1e-3) for step in steps)
    assert any(step["truncated"] for step in steps)
    roles = [[message["role"] for message in json.loads(line)["transcript"]] for line in one.splitlines()]
    assert ["user", "assistant", "user", "assistant"] in roles
