"""What `retrain explain` and `retrain plan` both estimate: the model, its memory, the runs, and earlier step times."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from retrain.campaign.plan import Run, plan_runs
from retrain.capacity.memory import Workload
from retrain.capacity.plan import MemoryPlan, plan_memory
from retrain.config import TrainConfig, load_config
from retrain.config.options import options_by_path, paths_where, values_of
from retrain.errors import ConfigError
from retrain.modeling.files import ModelFacts
from retrain.runtime.text import plural

MEMORY_LABELS = {
    "weights": "weights",
    "sampling_copy": "weights that only sampling uses",
    "adapter": "adapter, gradients, float32 masters, moments",
    "kv_cache": "KV cache, completions at full length",
    "activations": "activations per micro-batch",
    "logits": "logits per slice",
}
_MEASURED_STEPS = 20

LoggedStep = Mapping[str, object]


def list_runs(config: TrainConfig, file: str) -> list[Run]:
    """The run matrix, each condition validated as a configuration of its own; empty for a single run."""
    return plan_runs(config, Path(config.logging.log_dir), file) if config.campaign is not None else []


def runs_at_once(config: TrainConfig, runs: int) -> int:
    """How many runs of a campaign execute in parallel."""
    if config.campaign is None or not config.campaign.parallel:
        return 1
    return min(config.campaign.max_workers or runs, runs)


def steps_per_run(config: TrainConfig) -> int:
    """Steps of one run."""
    return config.campaign.max_steps if config.campaign else config.training.max_steps


def memory_plan(facts: ModelFacts, work: Workload, memory: int | None = None) -> MemoryPlan | None:
    """Peak memory by part, with the parameter count of the model's files; None for an unknown architecture."""
    if facts.shape is None:
        return None
    return plan_memory(facts.shape, work, memory, facts.parameters)


def measured_step_time(config: TrainConfig) -> tuple[float | None, str]:
    """Median seconds of logged steps of the same kind and size, and how that is known."""
    steps, where = logged_steps(config)
    if not steps:
        return None, "no step of this size has been measured yet"
    seconds = [step["step_time_s"] for step in steps]
    return statistics.median(s for s in seconds if isinstance(s, float)), (
        f"the median of {plural(len(steps), 'step')} in {where}"
    )


def logged_steps(config: TrainConfig) -> tuple[list[LoggedStep], str]:
    """Logged steps of the same kind and size, the newest last, and where they are."""
    log_dir = Path(config.logging.log_dir).expanduser()
    if config.campaign is None:
        folders, where = [log_dir], str(log_dir / "metrics.jsonl")
    elif config.logging.log_dir != options_by_path()["logging.log_dir"].default:
        folders, where = sorted(log_dir.glob("runs/*")), str(log_dir / "runs")
    else:
        folders, where = sorted(log_dir.parent.glob("campaign_*/runs/*")), f"{log_dir.parent}/campaign_*"
    size = (config.training.batch_size, config.training.group_size)
    comparable = [folder for folder in folders if _costs_the_same(folder, config)]
    return [step for folder in comparable for step in list(_read_steps(folder, size))[-_MEASURED_STEPS:]], where


def _costs_the_same(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in a folder has the same model, engine, device and step size."""
    if not (folder / "config.toml").is_file():
        return False
    from retrain.storage.folder import with_absolute_paths  # noqa: PLC0415  (loads numpy)

    try:
        stored = values_of(with_absolute_paths(load_config(folder / "config.toml")))
    except ConfigError:
        return False
    wanted = values_of(with_absolute_paths(config))
    return all(stored.get(path) == wanted[path] for path in wanted if path in paths_where("step_time"))


def _read_steps(folder: Path, size: tuple[int, int]) -> Iterator[LoggedStep]:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            step = json.loads(line)
            if (step["batch_size"], step["group_size"]) == size:
                yield step | {"step_time_s": float(step["step_time_s"])}
        except (ValueError, KeyError, TypeError):
            continue  # a torn last line, or a log of something else
