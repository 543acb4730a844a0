"""What `retrain explain` and `retrain plan` both estimate: the model, its memory, the runs, and earlier step times."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.campaign.plan import Run, plan_runs
from retrain.campaign.squeezing import check_analysis
from retrain.capacity.cost import count_evaluations
from retrain.capacity.memory import Workload
from retrain.capacity.plan import MemoryPlan, plan_memory
from retrain.config import TrainConfig, load_config
from retrain.config.options import paths_where, values_of
from retrain.data import count_steps, load_examples, load_held_out
from retrain.data.order import ExampleOrder
from retrain.errors import ConfigError, RetrainError
from retrain.modeling.files import ModelFacts
from retrain.plugins import REGISTRIES, is_plugin
from retrain.runtime.devices import is_on_cpu, machine_memory
from retrain.runtime.permissions import is_writable_folder, nearest_existing
from retrain.runtime.text import format_bytes, plural
from retrain.storage.checkpoint import Checkpoints
from retrain.storage.logs import MANIFEST
from retrain.types import Example, JsonObject

MEMORY_LABELS = {
    "weights": "weights",
    "sampling_copy": "weights that only sampling uses",
    "adapter": "adapter, gradients, float32 masters, moments",
    "kv_cache": "KV cache, completions at full length",
    "activations": "activations per micro-batch",
    "logits": "logits per slice",
}
CACHE_IS_FREED = "the KV cache is freed before training"
UNKNOWN_STEPS = "unknown: epochs count passes over examples, and how many there are is not known before the run"
_MEASURED_STEPS = 20

LoggedStep = Mapping[str, Any]


def list_runs(config: TrainConfig, file: str) -> list[Run]:
    """The run matrix, each condition validated as a configuration of its own; empty for a single run."""
    return plan_runs(config, Path(config.logging.log_dir), file) if config.campaign is not None else []


def check_resumed(config: TrainConfig, file: str) -> None:
    """Raise if the run or campaign to resume, if there is one, is missing or has other settings or examples.

    A campaign also continues the one that is in its folder; a single run moves it aside.
    """
    is_resumed = bool(config.resume.from_)
    if config.kind == "squeeze" or (config.kind == "train" and not is_resumed):
        return
    from retrain.campaign.earlier import check_earlier, choose_folder  # noqa: PLC0415  (loads numpy)
    from retrain.campaign.manifest import Manifest  # noqa: PLC0415
    from retrain.storage.folder import check_resume  # noqa: PLC0415

    if config.kind == "train":
        checkpoint, *_ = check_resume(config, force=False, log=lambda line: None)
        examples = _load_at_hand(config)
        if examples:
            ExampleOrder(examples, 0, config.training.max_examples).check_state_dict(checkpoint.state["order"])
        return
    folder = choose_folder(config)
    # The folder to resume is the campaign's; a run that has not begun resumes nothing.
    runs = plan_runs(config.model_copy(update={"resume": type(config.resume)()}), folder, file)
    if is_resumed or (folder / MANIFEST).is_file():
        check_earlier(Manifest.read(folder), config, runs, is_resumed)


def check_log_dir(config: TrainConfig) -> None:
    """Raise if a new run or campaign would replace files that are no run's."""
    from retrain.storage.aside import require_unoccupied  # noqa: PLC0415

    # That of a campaign without a name does not exist yet.
    folder = config.campaign_folder if config.kind == "campaign" else config.logging.log_dir
    if config.kind != "squeeze" and not config.resume.from_ and folder:
        require_unoccupied(Path(folder).expanduser())


def check_folders(config: TrainConfig, file: str) -> None:
    """Raise for what is known of the folders of a run or campaign: to resume, to write to, and for its analysis."""
    check_resumed(config, file)
    check_log_dir(config)
    folder = Path(config.campaign_folder or config.logging.log_dir).expanduser()
    existing = nearest_existing(folder)
    if config.kind != "squeeze" and not is_writable_folder(existing):
        raise ConfigError(f"[logging] log_dir: {existing} cannot be written to.  Try: another --log-dir")
    check_analysis(config, list_runs(config, file), folder)


def steps_per_run(config: TrainConfig) -> int | None:
    """Steps of one run; None if only loading its data or environment would show how many its epochs have."""
    if config.campaign is not None:
        return config.campaign.max_steps
    if not config.training.epochs:
        return config.training.max_steps
    examples = _load_at_hand(config)
    try:
        return count_steps(config.training, examples) if examples else None
    except RetrainError:
        return None  # training explains it


def _load_at_hand(config: TrainConfig) -> Sequence[Example]:
    """The examples of a run; empty if that would download or run something, or if training has to explain an error."""
    if _is_at_hand(config, config.data.source):
        with suppress(RetrainError):
            return load_examples(config.data)
    return ()


def count_held_out(config: TrainConfig) -> int | None:
    """Problems of an evaluation; None if only loading the data or environment would show how many there are."""
    if _is_at_hand(config, config.held_out_source):
        try:
            return len(load_held_out(config))
        except RetrainError:
            return None  # training explains it
    # An earlier evaluation of the same problems, with the same environment.
    options = paths_where("held_out") | paths_where("step_time")
    for folder in _find_folders(config)[0]:
        if not _find_differing(folder, config) & options:
            with suppress(OSError, ValueError, KeyError, TypeError), (folder / "eval.jsonl").open() as file:
                return len(json.loads(file.readline())["counted"])
    return None


def _is_at_hand(config: TrainConfig, source: str) -> bool:
    """Whether problems can be counted: nothing is downloaded for an estimate, and no plugin runs."""
    is_foreign = is_plugin("data", source) or REGISTRIES["data"].facts(source).from_hub
    return not config.environment.provider and not is_foreign


def max_turns(config: TrainConfig) -> int | None:
    """Maximum turns of a completion; None if the environment decides."""
    if not config.environment.provider:
        return 1
    return config.environment.max_turns if config.environment.max_turns > 0 else None


def find_assumptions(config: TrainConfig) -> list[str]:
    """What is not in the numbers of an estimate."""
    notes, limits, training = [], config.backpressure, config.training
    if config.resume.from_ and config.kind != "squeeze":
        notes.append(f"steps and times are those of {_describe_resumed(config)}")
    if limits.enabled:
        steps = "; epochs take more or fewer steps accordingly" if training.epochs else ""
        notes.append(
            f"[backpressure] changes the batch size, from {limits.min_batch_size} to {limits.max_batch_size} prompts; "
            f"memory, tokens and time are those of batch_size = {training.batch_size}{steps}"
        )
    if (campaign := config.campaign) is not None and campaign.max_workers > 1 and campaign.executor == "local":
        if campaign.share_model:
            each = "memory has the adapter, masters and moments of each"
            notes.append(f"{campaign.max_workers} runs share the model; {each}.  For fewer: [campaign] max_workers")
        elif campaign.parallel:
            notes.append(
                f"{campaign.max_workers} runs at a time use {config.backend.devices}, and each needs this memory.  "
                "For fewer: [campaign] max_workers"
            )
    if config.teaching.enabled:
        notes.append("[teaching] adds a student, whose memory and tokens are not included")
    if max_turns(config) != 1:
        notes.append("the environment may take several turns; memory and prompt tokens are those of the first turn")
    return notes


def _describe_resumed(config: TrainConfig) -> str:
    if config.kind == "campaign":
        return "the whole campaign, including those that are done: retrain status"
    done = max(Checkpoints(Path(config.resume.from_).expanduser(), 1, print).steps(), default=0)
    return f"the whole run; it has done {plural(done, 'step')}"


def find_short_memory(config: TrainConfig, needed: int | None) -> list[str]:
    """A note if a step on the CPU needs more than the memory of this machine."""
    has = machine_memory()
    if needed is None or needed <= has or not is_on_cpu(config.backend.devices):
        return []
    return [f"a step needs about {format_bytes(needed)} of memory, and this machine has {format_bytes(has)}"]


def memory_plan(facts: ModelFacts, work: Workload, memory: int | None = None) -> MemoryPlan | None:
    """Peak memory by part, with the parameter count of the model's files; None for an unknown architecture."""
    if facts.shape is None:
        return None
    return plan_memory(facts.shape, work, memory, facts.parameters)


@dataclass(frozen=True)
class MeasuredTime:
    """Median seconds of logged steps and of their evaluations, and how that is known; None if there are none."""

    step: float | None
    evaluation: float | None
    source: str

    def of_run(self, config: TrainConfig, steps: int | None) -> float | None:
        """Seconds of a run, with its evaluations if they were measured; None if unknown."""
        if self.step is None or steps is None:
            return None
        return self.step * steps + (self.evaluation or 0.0) * count_evaluations(config, steps)


def estimate_time(config: TrainConfig) -> JsonObject:
    """Seconds per step, evaluation and run, from earlier steps of the same size."""
    measured, steps = measure_time(config), steps_per_run(config)
    seconds = measured.of_run(config, steps)
    return {
        "steps": steps,
        "evaluations": count_evaluations(config, steps) if steps is not None else None,
        "step_seconds": round(measured.step, 3) if measured.step is not None else None,
        "evaluation_seconds": round(measured.evaluation, 3) if measured.evaluation is not None else None,
        "run_seconds": round(seconds, 1) if seconds is not None else None,
        "from": measured.source,
    }


def measure_time(config: TrainConfig) -> MeasuredTime:
    """Median seconds of logged steps of the same kind and size, and of evaluations of the same size."""
    logs, where = _read_logs(config)
    steps = [row["step_time_s"] for log in logs for row in log[-_MEASURED_STEPS:]]
    if not steps:
        return MeasuredTime(None, None, f"no step of this kind and size has been measured in {where}")
    evaluations = [row["eval_time_s"] for log in logs for row in log if "eval_time_s" in row]
    evaluation = statistics.median(evaluations) if evaluations else None
    return MeasuredTime(statistics.median(steps), evaluation, f"the median of {plural(len(steps), 'step')} in {where}")


def logged_steps(config: TrainConfig) -> tuple[list[LoggedStep], str]:
    """The last logged steps of the same kind and size, and where they are."""
    logs, where = _read_logs(config)
    return [step for log in logs for step in log[-_MEASURED_STEPS:]], where


def _find_folders(config: TrainConfig) -> tuple[list[Path], str]:
    """The folders of earlier runs, and a name for them."""
    log_dir = Path(config.logging.log_dir).expanduser()
    if config.campaign is None:
        # A resumed run has its logs there, also if it goes on elsewhere.
        earlier = Path(config.resume.from_).expanduser() if config.resume.from_ else log_dir
        return [earlier], str(earlier / "metrics.jsonl")
    if config.campaign_folder:
        folder = Path(config.campaign_folder).expanduser()
        return sorted(folder.glob("runs/*")), str(folder / "runs")
    return sorted(log_dir.parent.glob("campaign_*/runs/*")), f"{log_dir.parent}/campaign_*"


def _read_logs(config: TrainConfig) -> tuple[list[list[LoggedStep]], str]:
    """The logs of runs with the same model, engine, device and step size, and where they are."""
    folders, where = _find_folders(config)
    differing = {folder: _find_differing(folder, config) for folder in folders}
    return [
        list(_read_steps(folder, config, evaluates_alike=not other & paths_where("held_out")))
        for folder, other in differing.items()
        if not other & paths_where("step_time")
    ], where


def _find_differing(folder: Path, config: TrainConfig) -> set[str]:
    """The options in which the run in a folder differs; all of them if it has no configuration."""
    from retrain.storage.folder import with_absolute_paths  # noqa: PLC0415  (loads numpy)

    wanted = values_of(with_absolute_paths(config))
    try:
        stored = values_of(with_absolute_paths(load_config(folder / "config.toml")))
    except ConfigError:
        return set(wanted)
    return {path for path in wanted if stored.get(path) != wanted[path]}


def _read_steps(folder: Path, config: TrainConfig, evaluates_alike: bool) -> Iterator[LoggedStep]:
    """Steps of the same size: `step_time_s` without the evaluation, whose `eval_time_s` is kept if it is comparable."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    size = (config.training.batch_size, config.training.group_size)
    for line in lines:
        try:
            step = json.loads(line)
            if (step["batch_size"], step["group_size"]) != size:
                continue
            evaluation = float(step.pop("eval_time_s", 0.0))
            step["step_time_s"] = float(step["step_time_s"]) - evaluation
        except (ValueError, KeyError, TypeError):
            continue  # a torn last line, or a log of something else
        yield step | ({"eval_time_s": evaluation} if evaluation and evaluates_alike else {})
