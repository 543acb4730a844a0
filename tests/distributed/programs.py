"""The whole program on several ranks, one of them broken where a test wants it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain import cli
from retrain.config import dump_config, load_config
from retrain.distributed.learner import RankedLearner
from retrain.distributed.worker import Worker
from retrain.runtime.ranks import RankInfo
from tests.distributed.ranks import on_ranks

SMALL: dict[str, Any] = {
    "model.model": "builtin:tiny",
    "model.lora_rank": 4,
    "backend.devices": "cpu",
    "data.source": "arithmetic",
    "training.seed": 3,
    "training.batch_size": 4,
    "training.group_size": 4,
    "training.max_tokens": 24,
    "training.save_every": 2,
    "eval.every": 0,
}


@dataclass(frozen=True)
class Break:
    """What goes wrong: on which rank, at which command of a step, and how (raise, kill, interrupt)."""

    rank: int
    command: str
    how: str = "raise"
    step: int = 1


def write_config(folder: Path, options: dict[str, Any]) -> Path:
    path = folder / "run.toml"
    own = {"logging.log_dir": str(folder / "log"), "backend.adapter_path": str(folder / "adapter")}
    path.write_text(dump_config(load_config(None, SMALL | own | options)))
    return path


def run_program(world: int, folder: Path, broken: Break | None = None, **options: Any) -> tuple[int, str, float]:
    """Exit code of rank 0, what it printed, and how long the ranks went on after the break."""
    config = write_config(folder, {key.replace("__", "."): value for key, value in options.items()})
    printed = folder / "printed.txt"
    codes = on_ranks(world, _program, [str(config)], printed, broken, answering=1)
    struck = folder / "struck"
    return codes[0], printed.read_text(), time.time() - struck.stat().st_mtime if struck.exists() else 0.0


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def _program(rank_info: RankInfo, arguments: list[str], printed: Path, broken: Break | None) -> int:
    target = printed if rank_info.is_main else printed.with_name(f"rank_{rank_info.rank}.txt")
    with target.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if broken is not None and broken.rank == rank_info.rank:
        _break(broken, printed.with_name("struck"))
    if rank_info.world == 1:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    return cli.run(arguments)


def _break(broken: Break, mark: Path) -> None:
    def strike(command: str, step: int) -> None:
        if command != broken.command or step < broken.step or mark.exists():
            return
        mark.write_text("")
        if broken.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if broken.how == "interrupt":
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            return
        raise ValueError("broken on purpose")

    if broken.rank == 0:
        take_step = RankedLearner.take_step

        def take_step_or_break(self: RankedLearner, datums: Any, size: Any, step: int) -> Any:
            strike("Train", step)
            return take_step(self, datums, size, step)

        RankedLearner.take_step = take_step_or_break  # type: ignore[method-assign]
        return
    execute = Worker.execute

    def obey_or_break(self: Worker, command: Any) -> Any:
        strike(command.func.__name__.capitalize(), command.keywords.get("step", broken.step))
        return execute(self, command)

    Worker.execute = obey_or_break  # type: ignore[method-assign]
