"""Small runs over the fakes."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from retrain.cli import run
from retrain.config import TrainConfig, load_config
from retrain.config.load import dump_config
from retrain.tracking.console import Console
from retrain.trainer import TrainResult, train

PROBLEMS = [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(7)]


def write_problems(folder: Path, problems: list[dict[str, str]] | None = None) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems or PROBLEMS))
    return path


def fake_config(model: Path, folder: Path, **overrides: Any) -> TrainConfig:
    """Four steps of two prompts with four answers each, scored by `e2e.scores.score`; overrides are `section__key`."""
    small: dict[str, Any] = {
        "backend.backend": "e2e.fakes.build",
        "backend.adapter_path": str(folder / "adapter"),
        "model.model": str(model),
        "data.source": "jsonl",
        "data.path": str(
            write_problems(folder) if not (folder / "problems.jsonl").exists() else folder / "problems.jsonl"
        ),
        "training.seed": 1,
        "training.max_steps": 4,
        "training.batch_size": 2,
        "training.group_size": 4,
        "training.max_tokens": 64,
        "training.save_every": 2,
        "reward.type": "custom",
        "reward.custom_module": "e2e.scores",
        "reward.workers": 1,
        "logging.log_dir": str(folder / "logs"),
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})


def train_quietly(config: TrainConfig, **options: Any) -> tuple[TrainResult, str]:
    """Run it; returns the result and all that was printed."""
    stream = StringIO()
    result = train(config, console=Console(stream), **options)
    return result, stream.getvalue()


def run_command(config: TrainConfig, *flags: str) -> int:
    """The same through the command line, for its exit code."""
    path = Path(config.logging.log_dir).parent / "run.toml"
    path.write_text(dump_config(config))
    return run([str(path), *flags])


def rows(log_dir: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    # Only a newline ends a row: completions hold other characters that Unicode calls line breaks.
    return [json.loads(line) for line in (Path(log_dir) / name).read_text().split("\n") if line]


def rows_without_times(log_dir: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.endswith(("_time_s", "_per_s"))}
        for row in rows(log_dir, name)
    ]
