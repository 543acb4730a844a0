"""Run and campaign folders as runs leave them, with numbers that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.config import load_config
from retrain.config.load import dump_config


def write_run(
    folder: Path,
    rates: Sequence[float],
    held_out: Mapping[int, Sequence[int]] | None = None,
    status: str = "finished",
    **overrides: Any,
) -> Path:
    """A run whose correct_rate went like `rates`, and that answered held-out problems right (1) or wrong (0)."""
    settings: dict[str, Any] = {
        "model.model": "builtin:tiny",
        "backend.devices": "cpu",
        "data.source": "arithmetic",
        "training.seed": 42,
        "training.max_steps": max(1, len(rates)),
        "logging.log_dir": str(folder),
        "algorithm.advantage_mode": "grpo",
        "algorithm.transform_mode": "none",
    }
    config = load_config(None, settings | {key.replace("__", "."): value for key, value in overrides.items()})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(dump_config(config))
    rows = [
        {"step": step, "condition": config.condition, "correct_rate": rate, "loss": 1 - rate, "step_time_s": 0.5 + step}
        for step, rate in enumerate(rates)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [
        {
            "step": step,
            "eval_pass_at_1": sum(right) / len(right),
            "k": 1,
            "correct": list(right),
            "counted": [1] * len(right),
        }
        for step, right in (held_out or {}).items()
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    (folder / "trainer_state.json").write_text(json.dumps({"status": status, "step": len(rates)}))
    return folder


def write_campaign(folder: Path, scores: Mapping[str, Mapping[int, Sequence[int]]], **campaign: Any) -> Path:
    """A campaign over conditions `advantage+transform`; scores are held-out answers after four steps."""
    runs = []
    for condition, seeds in scores.items():
        advantage, transform = condition.split("+")
        for seed, right in seeds.items():
            name = f"{condition}_s{seed}"
            write_run(
                folder / "runs" / name,
                [0.1, 0.2, 0.3, sum(right) / len(right)],
                {0: [0] * len(right), 4: right},
                algorithm__advantage_mode=advantage,
                algorithm__transform_mode=transform,
                training__seed=seed,
                eval__every=4,
            )
            runs.append({"name": name, "condition": condition, "seed": seed, "folder": f"runs/{name}"})
    manifest = {"format": 1, "runs": runs, "config": {"campaign": campaign}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
