"""Batch sizes kept in a checkpoint: rounding depends on them, so a resume uses the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from retrain.backends.local.learner import Learner
from retrain.inference_engine import Described, InferenceEngine, ResumableSizes
from retrain.runtime.text import plural

SIZES_FILE = "sizes.json"


def save_sizes(path: Path, learner: Learner, engine: InferenceEngine) -> None:
    """Write the sizes of micro-batches and sampling batches, and the number of threads."""
    sizes = {
        "threads": torch.get_num_threads(),
        "training": learner.memory.state(),
        "sampling": engine.sizes() if isinstance(engine, ResumableSizes) else None,
    }
    (path / SIZES_FILE).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def load_sizes(path: Path, learner: Learner, engine: InferenceEngine) -> None:
    """Restore them; warns where that is impossible, since results then differ in their last digits."""
    file = path / SIZES_FILE
    if not file.exists():
        # A checkpoint of an earlier version.
        return
    sizes = json.loads(file.read_text(encoding="utf-8"))
    learner.memory.load(sizes["training"])
    on_cpu = learner.policy.device.type == "cpu"
    if on_cpu and sizes["threads"] != torch.get_num_threads():
        learner.log(
            f"Warning: this run used {plural(sizes['threads'], 'thread')} and now has {torch.get_num_threads()}; "
            "sums are split over threads, so results may differ in their last digits.  "
            f"Try: OMP_NUM_THREADS={sizes['threads']}"
        )
    if sizes["sampling"] is None or not isinstance(engine, ResumableSizes):
        return
    before = engine.description if isinstance(engine, Described) else ""
    if not engine.restore_sizes(sizes["sampling"]):
        learner.log(
            "Warning: the free memory has changed, or [training] overlap, so completions are sampled in another way "
            "and may differ."
        )
    if isinstance(engine, Described) and engine.description != before:
        learner.log(f"Engine: {engine.description}, as before the resume")
