"""`retrain explain`: what a configuration would do, without doing it. Touches no GPU and no network."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.model_files import ModelFacts, count_trainable, find_model, read_facts
from retrain.cli.train import find_config, load_environment
from retrain.config import TrainConfig, load_config
from retrain.config.absent import find_absent_parts
from retrain.config.conditions import condition_overrides
from retrain.config.flags import click_options, overrides_from
from retrain.config.load import build_condition
from retrain.config.options import all_options
from retrain.config.rules import values_of
from retrain.config.toml import format_value

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
# Adapter weight, gradient, and the two moments of AdamW, each in 32 bits.
_TRAINED_BYTES = 16
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
    memory (weights_bytes, training_bytes, kv_cache_bytes), time (step_seconds, run_seconds, from), files.
    """
    load_environment(announce=not as_json)
    overrides = overrides_from(parameters)
    path = find_config(config, overrides)
    data = explain(load_config(path, overrides), str(path))
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
        "runs": runs,
        "runs_at_once": _runs_at_once(config, len(runs)),
        "step": step if trains else None,
        "memory": estimate_memory(config, facts, trainable) if trains else None,
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
    """Sentences: parts that this version does not have, and a model that is nowhere."""
    nowhere = config.kind != "squeeze" and find_model(config.model.model).found == "missing"
    missing_model = [f"[model] model = {format_value(config.model.model)} is not there."] if nowhere else []
    return [*(str(problem) for problem in find_absent_parts(config)), *missing_model]


def list_runs(config: TrainConfig, file: str) -> list[dict[str, Any]]:
    """The run matrix, each condition checked as a configuration of its own."""
    if config.campaign is None:
        return []
    labels = []
    for number, condition in enumerate(config.campaign.conditions, start=1):
        overrides = dict(condition_overrides(condition))
        run = build_condition(config, condition, f"{file}, campaign condition {number}")
        others = {path: value for path, value in overrides.items() if not path.startswith("algorithm.")}
        labels.append((run.condition, ",".join(f"{path}={value}" for path, value in others.items())))
    counts = Counter(label for label, _ in labels)
    names = [f"{label},{extra}" if counts[label] > 1 and extra else label for label, extra in labels]
    return [
        {"name": f"{name}_s{seed}", "condition": name, "seed": seed} for name in names for seed in config.campaign.seeds
    ]


def _runs_at_once(config: TrainConfig, runs: int) -> int:
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


def _adapter(config: TrainConfig) -> dict[str, Any]:
    assert config.squeeze is not None
    path = config.squeeze.adapter_path
    exists = Path(path).expanduser().is_dir()
    return {"path": path, "exists": exists, "min_variance_retention": config.squeeze.min_variance_retention}


def estimate_memory(config: TrainConfig, facts: ModelFacts, trainable: int | None) -> dict[str, int | None]:
    """Bytes of weights, of what training adds, and of the KV cache if all completions ran to the end at once."""
    on_cpu = config.backend.devices.strip() == "cpu"
    width = {"fp32": 4, "bf16": 2, "auto": 4 if on_cpu else 2}[config.model.dtype]
    cached = facts.cached_values_per_token
    tokens = config.training.batch_size * config.training.group_size * config.training.max_tokens
    cache_width = {"auto": width, "bf16": 2, "fp8": 1, "int8": 1}[config.inference.kv_cache_dtype]
    return {
        "weights_bytes": facts.parameters * width if facts.parameters is not None else None,
        "training_bytes": trainable * _TRAINED_BYTES if trainable is not None else None,
        "kv_cache_bytes": cached * tokens * cache_width if cached is not None else None,
    }


def estimate_time(config: TrainConfig) -> dict[str, Any]:
    """Seconds by what earlier steps of the same size took; nothing is known before any were measured."""
    path = Path(config.logging.log_dir) / "metrics.jsonl"
    seconds = _measured_steps(path, config.training.batch_size, config.training.group_size)
    if not seconds:
        return {"step_seconds": None, "run_seconds": None, "from": "no step of this size has been measured yet"}
    mean = sum(seconds) / len(seconds)
    steps = config.campaign.max_steps if config.campaign else config.training.max_steps
    return {
        "step_seconds": round(mean, 3),
        "run_seconds": round(mean * steps, 1),
        "from": f"the last {len(seconds)} steps in {path}",
    }


def _measured_steps(path: Path, batch_size: int, group_size: int) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    seconds = []
    for line in lines:
        try:
            step = json.loads(line)
            if (step["batch_size"], step["group_size"]) == (batch_size, group_size):
                seconds.append(float(step["step_time_s"]))
        except (ValueError, KeyError, TypeError):
            continue  # a torn last line, or a log of something else
    return seconds[-_MEASURED_STEPS:]


def list_files(config: TrainConfig) -> list[str]:
    """What will be written where; `...` is filled in by the run."""
    log_dir = Path(config.logging.log_dir)
    if config.kind == "squeeze":
        assert config.squeeze is not None
        return [f"{config.squeeze.output_path}/"] if config.squeeze.output_path else []
    names = [*_RUN_FILES, "eval.jsonl", "checkpoints/step_.../"]
    names += ["rollouts/step_....npz"] if config.training.record else []
    if config.kind == "campaign":
        folder = f"{log_dir.parent}/campaign_<date>_<time>"
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
        return [
            ("adapter", f"{adapter['path']} ({'found' if adapter['exists'] else 'MISSING'})"),
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
        ("engine", f"{engine['name']}{' at ' + engine['url'] if engine['url'] else ''}"),
        ("backend", f"{engine['backend']} on {engine['devices']}"),
        ("completions", f"{step['completions']:,} a step ({step['prompts']:,} prompts)"),
        ("tokens", f"at most {step['max_tokens']:,} sampled a step"),
        ("memory: weights", _bytes(memory["weights_bytes"])),
        (
            "memory: training",
            _bytes(memory["training_bytes"], " of adapter, gradient and optimiser; activations extra"),
        ),
        ("memory: KV cache", _bytes(memory["kv_cache_bytes"], " if every completion were held to its end at once")),
        ("time", duration),
    ]
    return rows


def _bytes(count: int | None, remark: str = "") -> str:
    if count is None:
        return "unknown"
    return (f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB") + remark


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
