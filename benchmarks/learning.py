"""Does it learn? The embedded task under five methods and a control, several seeds each, on held-out problems.

    python benchmarks/learning.py [--seeds 5] [--steps N] [--workers 2] [--out table.md]

The control gives every group its own rewards in a random order: what is left without the reward's information.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

HERE = str(Path(__file__).parent)
CONDITIONS = {
    "grpo+none": ("grpo", "none"),
    "maxrl+none": ("maxrl", "none"),
    "maxrl+gtpo": ("maxrl", "gtpo"),
    "maxrl+gtpo_hicra": ("maxrl", "gtpo_hicra"),
    "maxrl+gtpo_sepa": ("maxrl", "gtpo_sepa"),
    "control: shuffled rewards": ("learning.shuffled", "none"),
}


def shuffled(rewards_G: np.ndarray) -> np.ndarray:
    """Group-centred rewards, dealt out at random; the global generator is seeded at every step."""
    mixed = np.random.permutation(rewards_G)
    return mixed - mixed.mean()


def run_once(name: str, seed: int, steps: int | None, folder: str) -> tuple[str, int, float, float, float]:
    import torch

    torch.set_num_threads(1)
    from retrain.config import load_config
    from retrain.config.reference import TEMPLATES
    from retrain.tracking.console import Console
    from retrain.trainer import train

    advantage, transform = CONDITIONS[name]
    run = Path(folder) / f"{advantage}_{transform}_s{seed}"
    overrides = dict(TEMPLATES["demo"].values) | {
        "algorithm.advantage_mode": advantage,
        "algorithm.transform_mode": transform,
        "training.seed": seed,
        "training.save_every": 10_000,
        "eval.every": 10_000,
        "eval.max_examples": 256,
        "logging.log_dir": str(run),
        "backend.adapter_path": str(run / "adapter"),
        "plugins.search_paths": [HERE],
        "reward.workers": 1,
    }
    if steps is not None:
        overrides["training.max_steps"] = steps
    started = time.perf_counter()
    with open(os.devnull, "w") as quiet:
        result = train(load_config(None, overrides), console=Console(quiet))
    before, after = result.first_evaluation, result.last_evaluation
    return name, seed, before.pass_at_1, after.pass_at_1, time.perf_counter() - started


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of the 95% t interval over seeds."""
    from scipy.stats import t

    if len(values) < 2:
        return float(np.mean(values)), math.nan
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(half)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    seeds = [42, 101, 202, 303, 404, 505, 606, 707][: args.seeds]
    rows: dict[str, list[tuple[int, float, float, float]]] = {name: [] for name in CONDITIONS}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool,
    ):
        jobs = [pool.submit(run_once, name, seed, args.steps, folder) for seed in seeds for name in CONDITIONS]
        for job in as_completed(jobs):
            name, seed, before, after, seconds = job.result()
            rows[name].append((seed, before, after, seconds))
            print(f"{name} seed {seed}: {before:.3f} -> {after:.3f} in {seconds:.0f} s", file=sys.stderr, flush=True)
    lines = ["| method | before | after, mean ± 95% | lowest seed | highest seed |", "|---|---|---|---|---|"]
    for name, results in rows.items():
        afters = [after for _, _, after, _ in results]
        mean, half = mean_and_interval(afters)
        before = np.mean([before for _, before, _, _ in results])
        lines.append(f"| {name} | {before:.3f} | {mean:.3f} ± {half:.3f} | {min(afters):.3f} | {max(afters):.3f} |")
    table = "\n".join(lines)
    print(table)
    if args.out:
        args.out.write_text(table + "\n\n" + json.dumps(rows) + "\n")
    learners = [np.mean([after - before for _, before, after, _ in r]) for n, r in rows.items() if "control" not in n]
    control = np.mean([after - before for _, before, after, _ in rows["control: shuffled rewards"]])
    return 0 if min(learners) > 0.2 and control < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
