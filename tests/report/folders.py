"""Run folders written by hand, as a run would leave them."""

from __future__ import annotations

import json
from pathlib import Path

from retrain.config import load_config
from retrain.config.load import dump_config
from retrain.storage.logs import EVALS, GENERATIONS, METRICS


def write_run(folder: Path, seed: int, mode: str = "grpo", steps: int = 6, lift: float = 0.0) -> Path:
    (folder / "emergence").mkdir(parents=True)
    options = {"seed": seed, "max_steps": steps, "group_size": 2, "batch_size": 1}
    named = {"algorithm.advantage_mode": mode, "model.model": "builtin:tiny"}
    config = load_config(None, {f"training.{key}": value for key, value in options.items()} | named)
    (folder / "config.toml").write_text(dump_config(config))
    metrics, generations, evals = [], [], []
    for step in range(steps):
        rate = 0.3 + 0.05 * step + lift + 0.01 * seed
        metrics.append({"step": step, "condition": config.condition, "correct_rate": rate, "mean_reward": rate,
                        "loss": None, "step_time_s": 2.0, "sample_time_s": 1.0, "score_time_s": 0.1,
                        "train_time_s": 0.5, "batch_size": 1, "groups_all_right": 0, "groups_all_wrong": step % 2,
                        "reward_errors": 0})  # fmt: skip
        for number in range(2):
            text = f"answer {number} </script><b>bold</b> {step}"
            generations.append({"step": step, "prompt": f"1+{step}=?", "completion": text, "reward": float(number),
                                "num_tokens": 3, "outcome": "right" if number else "wrong"})  # fmt: skip
    for step in (0, steps):
        rate = 0.4 + lift + 0.01 * seed
        evals.append({"step": step, "eval_pass_at_1": rate, "eval_ci_low": rate - 0.1, "eval_ci_high": rate + 0.1,
                      "eval_pass_at_k": rate, "k": 1, "correct": [1, 0], "counted": [1, 1]})  # fmt: skip
    for name, rows in ((METRICS, metrics), (GENERATIONS, generations), (EVALS, evals)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trainer_state.json").write_text(json.dumps({"status": "finished", "step": steps}))
    return folder
