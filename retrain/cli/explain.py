"""`retrain explain`: what a configuration would do, without doing it. Touches no GPU and no network."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click

from retrain.campaign.plan import plan_runs
from retrain.capacity.memory import MEMORY_PARTS, PROMPT_TOKENS, plan_memory, workload_of
from retrain.checks.preflight import find_obstacles
from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.train import find_config, load_environment, show_notes
from retrain.config import TrainConfig, load_config
from retrain.config.absent import find_absent_parts
from retrain.config.flags import click_options, overrides_from
from retrain.config.options import all_options, options_by_path
from retrain.config.rules import values_of
from retrain.config.toml import format_value
from retrain.errors import ConfigError
from retrain.modeling.files import ModelFacts, count_trainable, find_model, read_facts

_KINDS = {"train": "a training run", "campaign": "a campaign", "squeeze": "a LoRA rank analysis"}
_FOUND = {
    "builtin": "embedded in the package",
    "folder": "a local folder",
    "cache": "in the Hugging Face cache",
    "download": "not on this machine; it will be downloaded",
    "missing": "MISSING",
}
_RUN_FILES = (
    "config.toml",
    "metrics.jsonl",
    "emergence/steps.jsonl",
    "emergence/generations.jsonl",
    "trainer_state.json",
)
_MEASURED_STEPS = 20


@click.command("explain", short_help="Say what a configuration would do.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config: str | None, as_json: bool, **parameters: Any) -> None:
    """Say what CONFIG (./retrain.toml when it is left out) would do, with any flags that training takes.

    The JSON has these keys, null where nothing can be known: file, kind (train, campaign, squeeze), condition,
    blockers (sentences: why it cannot run here), changed (path, value, default), adapter (path, exists,
    min_variance_retention; of a squeeze), model (name, found, path, parameters, parameters_from, trainable), engine
    (name, url, backend, devices), runs (name, condition, seed), runs_at_once, step (prompts, completions, max_tokens),
    memory (weights_bytes, sampling_copy_bytes, adapter_bytes, kv_cache_bytes, activations_bytes, logits_bytes,
    total_bytes, micro_batch_tokens, recomputed_layers), time (step_seconds, run_seconds, from), files.
    """
    load_environment(announce=not as_json)
    overrides = overrides_from(parameters)
    path = find_config(config, overrides)
    loaded = load_config(path, overrides)
    show_notes(loaded)
    data = explain(loaded, str(path))
    if as_json:
        print_json(data)
    else:
        _print(data)


command.params.extend(click_options())


def explain(config: TrainConfig, file: str) -> dict[str, Any]:
    """All that `retrain explain` knows, as the JSON shows it."""
    trains = config.kind != "squeeze"
    files = find_model(config.model.model)
    facts = read_facts(files)
    trainable = count_trainable(facts, config.model.lora_rank, config.lora.target_modules)
    model = {
        "name": config.model.model,
        "found": files.found,
        "path": str(files.folder) if files.folder else None,
        "parameters": facts.parameters,
        "parameters_from": facts.parameters_from,
        "trainable": trainable,
    }
    runs = list_runs(config, file)
    completions = config.training.batch_size * config.training.group_size
    step = {
        "prompts": config.training.batch_size,
        "completions": completions,
        "max_tokens": completions * config.training.max_tokens,
    }
    return {
        "file": file,
        "kind": config.kind,
        "condition": config.condition if config.kind == "train" else None,
        "blockers": find_blockers(config),
        "changed": find_changes(config),
        "adapter": _adapter(config) if config.kind == "squeeze" else None,
        "model": model if trains else None,
        "engine": _engine(config) if trains else None,
        "problems": _problems(config) if trains else None,
        "runs": runs,
        "runs_at_once": runs_at_once(config, len(runs)),
        "step": step if trains else None,
        "memory": estimate_memory(config, facts) if trains else None,
        "time": estimate_time(config) if trains else None,
        "files": list_files(config),
    }


def find_changes(config: TrainConfig) -> list[dict[str, Any]]:
    """Options whose value is not the default, in the order of the schema."""
    values = values_of(config)
    defaults = {option.path: _plain(option.default) for option in all_options()}
    plain = {path: _plain(value) for path, value in values.items()}
    return [
        {"path": path, "value": value, "default": defaults[path]}
        for path, value in plain.items()
        if value != defaults[path]
    ]


def find_blockers(config: TrainConfig) -> list[str]:
    """Sentences: choices that nothing here honours, and models, files and keys that are nowhere."""
    obstacles = find_obstacles(config) if config.kind != "squeeze" else ()
    return [str(problem) for problem in (*find_absent_parts(config), *obstacles)]


def list_runs(config: TrainConfig, file: str) -> list[dict[str, Any]]:
    """The run matrix, each condition checked as a configuration of its own."""
    if config.campaign is None:
        return []
    runs = plan_runs(config, Path(config.logging.log_dir), file)
    return [{"name": run.name, "condition": run.condition, "seed": run.seed} for run in runs]


def runs_at_once(config: TrainConfig, runs: int) -> int:
    """How many of a campaign's runs go on side by side."""
    if config.campaign is None or not config.campaign.parallel:
        return 1
    return min(config.campaign.max_workers or runs, runs)


def _engine(config: TrainConfig) -> dict[str, Any]:
    inference = config.inference
    if config.backend.backend == "tinker":
        url = config.model.base_url or None
        return {"name": "tinker", "url": url, "backend": "tinker", "devices": "the service"}
    return {
        "name": inference.engine,
        "url": inference.url or None,
        "backend": config.backend.backend,
        "devices": config.backend.devices,
    }


def _problems(config: TrainConfig) -> str:
    """Where the problems and their scores come from."""
    environment = config.environment
    if environment.provider:
        turns = f", at most {environment.max_turns} turns" if environment.max_turns > 0 else ""
        return f"environment {environment.id or environment.provider} ({environment.provider}){turns}"
    rewards = "+".join(term.type for term in config.reward.terms) or config.reward.type
    named = config.teaching.student_model
    base = "the base model with the adapter off" if config.model.lora_rank else "a frozen copy of the model"
    student = f", answered by {f'the student {named}' if named else base}" if config.teaching.enabled else ""
    return f"data {config.data.source}, reward {rewards}{student}"


def _adapter(config: TrainConfig) -> dict[str, Any]:
    assert config.squeeze is not None
    path = config.squeeze.adapter_path
    # What is on a service is not asked for here.
    exists = None if path.startswith("tinker://") else Path(path).expanduser().is_dir()
    return {"path": path, "exists": exists, "min_variance_retention": config.squeeze.min_variance_retention}


def estimate_memory(config: TrainConfig, facts: ModelFacts) -> dict[str, int | None]:
    """Bytes by part on a card that is large enough, at the moment of a step that needs most; None where unknown."""
    work = workload_of(config, PROMPT_TOKENS)
    weights = facts.parameters * work.width if facts.parameters is not None else None
    if facts.shape is None:
        parts: dict[str, int | None] = dict.fromkeys(f"{part}_bytes" for part in (*MEMORY_PARTS, "total"))
        return {**parts, "weights_bytes": weights, "micro_batch_tokens": None, "recomputed_layers": None}
    plan = plan_memory(facts.shape, work)
    known = {f"{part}_bytes": int(getattr(plan, part)) for part in MEMORY_PARTS}
    known["weights_bytes"] = weights if weights is not None else plan.weights
    return {
        **known,
        "total_bytes": sum(known.values()),
        "micro_batch_tokens": plan.training.micro_batch_tokens,
        "recomputed_layers": plan.training.recomputed_layers,
    }


def estimate_time(config: TrainConfig) -> dict[str, Any]:
    """Seconds by what earlier steps of the same size took; nothing is known before any were measured."""
    seconds, where = measured_steps(config)
    if not seconds:
        return {"step_seconds": None, "run_seconds": None, "from": "no step of this size has been measured yet"}
    usual = statistics.median(seconds)
    return {
        "step_seconds": round(usual, 3),
        "run_seconds": round(usual * steps_of(config), 1),
        "from": f"the median of {len(seconds)} steps in {where}",
    }


def steps_of(config: TrainConfig) -> int:
    """Steps of one run."""
    return config.campaign.max_steps if config.campaign else config.training.max_steps


def measured_steps(config: TrainConfig) -> tuple[list[float], str]:
    """Seconds of logged steps of the same kind and size, the newest last, and where they are."""
    rows, where = logged_steps(config)
    return [float(row["step_time_s"]) for row in rows], where


def logged_steps(config: TrainConfig) -> tuple[list[dict[str, Any]], str]:
    """Rows of logged steps of the same kind and size, the newest last, and where they are."""
    log_dir = Path(config.logging.log_dir).expanduser()
    if config.campaign is None:
        folders, where = [log_dir], str(log_dir / "metrics.jsonl")
    elif config.logging.log_dir != options_by_path()["logging.log_dir"].default:
        folders, where = sorted(log_dir.glob("runs/*")), str(log_dir / "runs")
    else:
        folders, where = sorted(log_dir.parent.glob("campaign_*/runs/*")), f"{log_dir.parent}/campaign_*"
    found: list[dict[str, Any]] = []
    for folder in folders:
        if _takes_as_long(folder, config):
            found += _read_steps(folder / "metrics.jsonl", config.training.batch_size, config.training.group_size)
    return found, where


# What a step's time hangs on. Learning rates, seeds and the like cost nothing.
_COSTLY = (
    "model.", "backend.backend", "backend.devices", "inference.", "lora.target_modules", "memory.", "distributed.",
    "data.source", "data.path", "data.id", "data.subset", "data.system_prompt", "environment.", "teaching.enabled",
    "teaching.student_model", "reward.type", "kl.beta", "training.batch_size", "training.group_size",
    "training.max_tokens", "training.max_prompt_tokens", "training.async_steps", "training.resample_dead_groups",
)  # fmt: skip
_HARMLESS = (
    "model.base_url",
    "inference.adapter_dir",
    "inference.timeout_s",
    "inference.wait_s",
    "environment.timeout_s",
)


def _takes_as_long(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in a folder had this model, engine and device, and steps of this size."""
    if not (folder / "config.toml").is_file():
        return False
    from retrain.storage.folder import with_absolute_paths  # noqa: PLC0415  (loads numpy)

    try:
        stored = values_of(with_absolute_paths(load_config(folder / "config.toml")))
    except ConfigError:
        return False
    wanted = values_of(with_absolute_paths(config))
    costly = (path for path in wanted if path.startswith(_COSTLY) and not path.startswith(_HARMLESS))
    return all(stored.get(path) == wanted[path] for path in costly)


def _read_steps(path: Path, batch_size: int, group_size: int) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            step = json.loads(line)
            if (step["batch_size"], step["group_size"]) == (batch_size, group_size):
                rows.append(step | {"step_time_s": float(step["step_time_s"])})
        except (ValueError, KeyError, TypeError):
            continue  # a torn last line, or a log of something else
    return rows[-_MEASURED_STEPS:]


def list_files(config: TrainConfig) -> list[str]:
    """What will be written where; `...` is filled in by the run."""
    log_dir = Path(config.logging.log_dir)
    if config.kind == "squeeze":
        assert config.squeeze is not None
        return [f"{config.squeeze.output_path}/"] if config.squeeze.output_path else []
    names = [*_RUN_FILES, "eval.jsonl", "checkpoints/step_.../"]
    names += ["rollouts/step_....npz"] if config.training.record else []
    names += ["debug.jsonl"] if config.logging.debug else []
    if config.kind == "campaign":
        is_default = config.logging.log_dir == options_by_path()["logging.log_dir"].default
        folder = f"{log_dir.parent}/campaign_<date>_<time>" if is_default else str(log_dir)
        return [f"{folder}/manifest.json", *(f"{folder}/runs/<condition>_s<seed>/{name}" for name in names)]
    return [*(f"{log_dir}/{name}" for name in names), f"{config.backend.adapter_path}/"]


def _plain(value: Any) -> Any:
    """Tuples and models as JSON has them, so that values compare and print alike."""
    return json.loads(json.dumps(value, default=lambda item: item.model_dump(by_alias=True)))


def _print(data: dict[str, Any]) -> None:
    click.echo(f"{data['file']}: {_KINDS[data['kind']]}")
    for blocker in data["blockers"]:
        click.echo(f"cannot run here: {blocker}")
    print_heading("What differs from the defaults")
    rows = [
        (_where(change["path"]), format_value(change["value"]), f"default {format_value(change['default'])}")
        for change in data["changed"]
    ]
    print_table(("option", "value", "default"), rows or [("nothing", "", "")])
    print_heading("What will happen")
    print_table(("what", "value"), _summary(data))
    if data["runs"]:
        print_heading(f"Runs ({len(data['runs'])}, {data['runs_at_once']} at a time)")
        print_table(("run", "condition", "seed"), [(r["name"], r["condition"], str(r["seed"])) for r in data["runs"]])
    print_heading("Files that will be written")
    for file in data["files"] or ["none: the analysis is printed"]:
        click.echo(f"  {file}")


def _where(path: str) -> str:
    section, _, key = path.partition(".")
    return f"[{section}] {key}"


def _summary(data: dict[str, Any]) -> list[tuple[str, str]]:
    if data["kind"] == "squeeze":
        adapter = data["adapter"]
        where = {True: "found", False: "MISSING", None: "to be downloaded"}[adapter["exists"]]
        return [
            ("adapter", f"{adapter['path']} ({where})"),
            ("analysis", f"the smallest rank that keeps {adapter['min_variance_retention']:.0%} of the variance"),
        ]
    model, engine, step, memory, time = (data[key] for key in ("model", "engine", "step", "memory", "time"))
    parameters = f"{model['parameters']:,}" if model["parameters"] is not None else "unknown"
    trainable = f"{model['trainable']:,}" if model["trainable"] is not None else "unknown"
    duration = time["from"]
    if time["step_seconds"] is not None:
        duration = f"{time['step_seconds']} s a step, {_duration(time['run_seconds'])} a run, by {time['from']}"
    rows = [
        ("condition", data["condition"] or f"{len({run['condition'] for run in data['runs']})} conditions"),
        ("model", f"{model['name']} ({_FOUND[model['found']]})"),
        ("parameters", f"{parameters} (from {model['parameters_from']})" if model["parameters"] else parameters),
        ("trainable", trainable),
        ("problems", data["problems"]),
        ("engine", f"{engine['name']}{' at ' + engine['url'] if engine['url'] else ''}"),
        ("backend", f"{engine['backend']} on {engine['devices']}"),
        ("completions", f"{step['completions']:,} a step ({step['prompts']:,} prompts)"),
        ("tokens", f"at most {step['max_tokens']:,} sampled a step"),
        ("memory: weights", _bytes(memory["weights_bytes"])),
        ("memory: copy", _bytes(memory["sampling_copy_bytes"], " of the adapted matrices, folded for sampling")),
        ("memory: adapter", _bytes(memory["adapter_bytes"], " with gradient, float32 masters and moments")),
        ("memory: KV cache", _bytes(memory["kv_cache_bytes"], " if every completion runs to its end")),
        ("memory: activations", _bytes(memory["activations_bytes"], _cut_up(memory))),
        ("memory: logits", _bytes(memory["logits_bytes"], " of one slice")),
        ("memory: in all", _bytes(memory["total_bytes"], "; `retrain plan` says what fits a card")),
        ("time", duration),
    ]
    return rows


def _cut_up(memory: dict[str, Any]) -> str:
    if not memory["micro_batch_tokens"]:
        return ""
    again = memory["recomputed_layers"]
    return f" of {memory['micro_batch_tokens']:,} tokens" + (f", {again} layers recomputed" if again else "")


def _bytes(count: int | None, remark: str = "") -> str:
    if count is None:
        return "unknown"
    return (f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB") + remark


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
