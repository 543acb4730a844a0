"""Campaigns over fakes: a configuration, and an executor whose runs end as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.campaign.plan import Run, plan_runs
from retrain.campaign.processes import RunExit, prepare_folder
from retrain.campaign.run import run_campaign
from retrain.checks.code_digest import code_digests
from retrain.config import TrainConfig
from retrain.config.load import build_config
from retrain.data import digest_of, load_held_out
from retrain.modeling.digest import digest_models

GRPO = {"advantage_mode": "grpo", "transform_mode": "none"}
MAXRL = {"advantage_mode": "maxrl", "transform_mode": "none"}
TESTS = Path(__file__).parents[1]


def campaign_config(folder: Path | None, tables: dict[str, Any] | None = None, **campaign: Any) -> TrainConfig:
    """Two conditions with two seeds, four steps each, over the fake backend."""
    base: dict[str, Any] = {
        "backend": {"backend": "e2e.fakes.build"},
        "model": {"model": "builtin:tiny"},
        "training": {"batch_size": 2, "group_size": 4, "max_tokens": 32, "save_every": 2},
        "data": {"source": "arithmetic"},
        "reward": {"type": "custom", "custom_module": "e2e.scores", "workers": 1},
        "plugins": {"search_paths": [".", str(TESTS)]},
        "campaign": {"seeds": [1, 2], "max_steps": 4, "conditions": [GRPO, MAXRL]} | campaign,
    }
    if folder is not None:
        base["logging"] = {"log_dir": str(folder)}
    for name, table in (tables or {}).items():
        base[name] = base.get(name, {}) | table
    return build_config(base, {}, "campaign.toml")


def planned(config: TrainConfig) -> list[Run]:
    return plan_runs(config, Path(config.logging.log_dir).absolute(), "campaign.toml")


def manifest_of(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return table


def statuses(folder: Path) -> dict[str, str]:
    return {record["name"]: record["status"] for record in manifest_of(folder)["runs"]}


def rate_by_seed(run: Run) -> float:
    return 0.5 + run.seed / 1000


def write_result(run: Run, rate: float, steps: int | None = None, status: str = "finished") -> None:
    """What a run leaves, without running it."""
    prepare_folder(run)
    done = run.max_steps if steps is None else steps
    rows = [
        {"step": s, "condition": run.condition, "correct_rate": rate, "mean_reward": rate, "step_time_s": 0.5}
        for s in range(done)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    used = {"code": code_digests(run.config), "models": digest_models(run.config)}
    if run.config.eval.path:
        used |= {"held_out": digest_of(load_held_out(run.config))}
    (run.folder / "trainer_state.json").write_text(json.dumps({"status": status, "step": done, **used}))


class FakeExecutor:
    """Ends each run a few polls after it was started. `codes` are exit codes of runs that are to go wrong."""

    def __init__(self, rate: Callable[[Run], float] = rate_by_seed, codes: dict[str, int] | None = None) -> None:
        self.rate = rate
        self.codes = codes or {}
        self.going: dict[str, tuple[Run, int]] = {}
        self.started: list[str] = []
        self.most = 0
        self.calls: list[str] = []
        self.on_poll: Callable[[], None] = lambda: None
        self.stubborn = False

    def start(self, run: Run) -> None:
        self.started.append(run.name)
        self.going[run.name] = (run, 2)
        self.most = max(self.most, len(self.going))

    def poll(self) -> list[RunExit]:
        self.on_poll()
        self.going = {name: (run, left - 1) for name, (run, left) in self.going.items()}
        over = [run for run, left in self.going.values() if left <= 0]
        return [self._end(run) for run in over]

    def _end(self, run: Run) -> RunExit:
        del self.going[run.name]
        code = self.codes.get(run.name, 0)
        write_result(run, self.rate(run), *((2, "running") if code else ()))
        return RunExit(run.name, code, "it broke" if code else "")

    def stop(self) -> None:
        self.calls.append("stop")
        if not self.stubborn:
            self.codes |= dict.fromkeys(self.going, 130)

    def kill(self) -> None:
        self.calls.append("kill")
        self.codes |= dict.fromkeys(self.going, -9)
        self.going = {name: (run, 0) for name, (run, _) in self.going.items()}

    def close(self) -> None:
        self.calls.append("close")


def run_with(executor: FakeExecutor, config: TrainConfig, monkeypatch: Any, force: bool = False) -> int:
    """The campaign, on this executor."""
    monkeypatch.setattr("retrain.campaign.run.build_executor", lambda *given: executor)
    monkeypatch.setattr("retrain.campaign.run.POLL_S", 0.001)
    return run_campaign(config, force, "campaign.toml")
