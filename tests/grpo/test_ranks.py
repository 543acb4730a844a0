"""A script that torchrun starts twice trains as one that runs alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys

from peft import LoraConfig

from retrain.grpo import GRPOConfig, GRPOTrainer


def shortest(completions, **columns):
    return [-float(len(text)) for text in completions]


args = GRPOConfig(
    sys.argv[1], max_steps=2, per_device_train_batch_size=int(sys.argv[2]), num_generations=4, use_cpu=True,
    max_completion_length=12, learning_rate=1e-3,
)
rows = [{"prompt": f"{n} + {n} ="} for n in range(8)]
lora = LoraConfig(r=4, target_modules="all-linear")
trainer = GRPOTrainer("builtin:tiny", shortest, args, rows, eval_dataset=rows[:2], peft_config=lora)
result = trainer.train()
print("END", result.global_step, trainer.evaluate()["eval_reward"])
"""


def play(folder: Path, launcher: list[str], per_device: int) -> tuple[list[dict[str, Any]], str]:
    """The metrics of a run, and what the script printed after it."""
    (folder / "script.py").write_text(SCRIPT)
    name = f"run_{per_device}"
    done = subprocess.run(
        [sys.executable, *launcher, "script.py", name, str(per_device)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("END")]
    assert len(ends) == 1
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()], ends[0]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    alone, end = play(tmp_path, [], 8)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both, same_end = play(tmp_path, launcher, 4)
    assert len(alone) == len(both) == 2 and end == same_end
    for one, two in zip(alone, both, strict=True):
        assert (one["mean_reward"], one["num_datums"]) == (two["mean_reward"], two["num_datums"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
