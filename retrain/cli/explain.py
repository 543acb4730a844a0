"""`retrain explain`: what a configuration would do, without doing it. Touches no GPU and no network."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import BaseModel

from retrain.campaign.plan import Run, find_idle, find_limits, name_conditions, runs_at_once, split_conditions
from retrain.capacity.memory import PROMPT_TOKENS, workload_of
from retrain.capacity.plan import MEMORY_PARTS
from retrain.checks.preflight import check_files_of_problems, find_obstacles
from retrain.checks.processes import LAUNCH_NOTE, lacks_gpu, needs_launch
from retrain.checks.unsupported import find_unsupported
from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.estimate import (
    CACHE_IS_FREED,
    MEMORY_LABELS,
    UNKNOWN_STEPS,
    check_folders,
    estimate_time,
    find_assumptions,
    find_short_memory,
    list_runs,
    max_turns,
    memory_plan,
    steps_per_run,
)
from retrain.cli.train import read_config, strict_option
from retrain.config import TrainConfig
from retrain.config.flags import click_options
from retrain.config.options import all_options, options_by_path, values_of
from retrain.config.toml import format_value
from retrain.errors import RetrainError
from retrain.modeling.files import ModelFacts, count_trainable, find_model, read_facts, why_shape_is_unknown
from retrain.runtime.text import format_bytes, format_duration, plural
from retrain.types import JsonObject

_KINDS = {"train": "a training run", "campaign": "a campaign", "squeeze": "a LoRA rank analysis"}
_FOUND = {
    "builtin": "included in the package",
    "folder": "a local folder",
    "cache": "in the Hugging Face cache",
    "download": "not on this machine; {what} will be downloaded (`retrain doctor` tries it)",
    "missing": "MISSING",
    "file": "a file, not a folder",
}
_DEVICES = {"auto": "a GPU, or the CPU where there is none"}
_RUN_FILES = (
    "config.toml",
    "metrics.jsonl",
    "emergence/steps.jsonl",
    "emergence/generations.jsonl",
    "trainer_state.json",
    "checkpoints/step_.../",
)


@click.command("explain", short_help="Show what a configuration would do.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@strict_option
def command(config: str | None, as_json: bool, strict: bool, **parameters: object) -> int:
    """Show what CONFIG (default: ./retrain.toml) would do.

    Exits with 1 if it cannot run here. All flags of training are accepted as well: see `retrain help`.

    \b
    The JSON has these keys, null where unknown:
      file          the configuration
      kind          train, campaign or squeeze
      condition     the label of the run
      blockers      reasons why it cannot run here
      notes         how to start it; parts of a method that stay off; what is not
                    in the numbers
      changed       options that differ: path, value, default
      adapter       for a squeeze: path, exists, min_variance_retention
      model         name, found, path, parameters, parameters_from, trainable
      engine        name, url, backend, devices
      problems      where problems and rewards come from
      conditions    for a campaign: name, model, engine, problems, step, memory and
                    time of each; elsewhere, these are of the one that needs most
      runs          for a campaign: name, condition, seed
      runs_at_once  number of concurrent runs
      take_turns    whether only one of these steps at a time: they share a model
      draws_seed    whether the run draws its seed when it starts
      step          prompts, completions, turns (maximum per completion),
                    max_tokens (of one turn if turns is null)
      memory        weights_bytes, sampling_copy_bytes, adapter_bytes,
                    kv_cache_bytes, activations_bytes, logits_bytes, total_bytes,
                    frees_cache (the KV cache, before training),
                    micro_batch_tokens, recomputed_layers, prompt_tokens
      time          steps, evaluations, step_seconds, evaluation_seconds,
                    run_seconds (with evaluations, where their time is known),
                    from
      files         what the run writes
    """
    path, loaded = read_config(config, parameters, as_json, strict)
    data = explain(loaded, str(path))
    if as_json:
        print_json(data)
    else:
        _print(data)
    return 1 if data["blockers"] else 0


command.params.extend(click_options(listed=()))


def explain(config: TrainConfig, file: str) -> JsonObject:
    """Everything that `retrain explain` prints, under the keys that its help lists; None where one does not apply."""
    runs = list_runs(config, file)
    conditions = split_conditions(config, file)
    sizes = [{"name": name, **_sizes(one)} for name, one in conditions.items()]
    largest = max(sizes, key=_most, default=dict.fromkeys(("model", "engine", "problems", "step", "memory", "time")))
    return {
        "file": file,
        "kind": config.kind,
        "condition": config.condition if config.kind == "train" else None,
        "blockers": find_blockers(config, file),
        "notes": [
            *find_notes(config, runs),
            *find_short_memory(config, (largest["memory"] or {}).get("total_bytes")),
        ],
        "changed": find_changes(config),
        "adapter": _adapter(config),
        "model": largest["model"],
        "engine": largest["engine"],
        "problems": largest["problems"],
        "conditions": sizes if config.kind == "campaign" else [],
        "runs": [{"name": run.name, "condition": run.condition, "seed": run.seed} for run in runs],
        "runs_at_once": runs_at_once(config.campaign, len(runs)) if config.campaign is not None else 1,
        "take_turns": config.campaign is not None and config.campaign.share_model,
        "draws_seed": config.kind == "train" and config.training.seed < 0 and not config.resume.from_,
        "step": largest["step"],
        "memory": largest["memory"],
        "time": largest["time"],
        "files": list_files(config),
    }


def _sizes(config: TrainConfig) -> JsonObject:
    """The model and the tasks of a run, its step, memory and time."""
    files = find_model(config.model.model)
    facts = read_facts(files)
    completions = config.training.batch_size * config.training.group_size
    return {
        "model": {
            "name": config.model.model,
            "found": files.found,
            "path": str(files.folder) if files.folder else None,
            "parameters": facts.parameters,
            "parameters_from": facts.parameters_from,
            "trainable": count_trainable(facts, config.model.lora_rank, config.lora.target_modules),
        },
        "engine": _engine(config),
        "problems": _tasks(config),
        "step": {
            "prompts": config.training.batch_size,
            "completions": completions,
            "turns": max_turns(config),
            "max_tokens": completions * config.training.max_tokens * (max_turns(config) or 1),
        },
        "memory": estimate_memory(config, facts) if config.backend.backend == "local" else None,
        "time": estimate_time(config),
    }


def _most(sizes: JsonObject) -> tuple[int, int]:
    """What the conditions of a campaign are ordered by: memory, where it is known, then tokens."""
    return (sizes["memory"] or {}).get("total_bytes") or 0, sizes["step"]["max_tokens"]


def find_changes(config: TrainConfig) -> list[JsonObject]:
    """Options whose value is not the default, in the order of the schema."""
    defaults = {option.path: _plain(option.default) for option in all_options()}
    values = {path: _plain(value) for path, value in values_of(config).items()}
    return [
        {"path": path, "value": value, "default": defaults[path]}
        for path, value in values.items()
        if value != defaults[path]
    ]


def find_blockers(config: TrainConfig, file: str) -> list[str]:
    """Why the configuration cannot run here: unsupported choices, missing models, files and keys, rows, a resume."""
    found: dict[str, list[str]] = {}
    conditions = split_conditions(config, file)
    for name, one in conditions.items():
        for problem in (*find_unsupported(one), *find_obstacles(one)):
            found.setdefault(str(problem), []).append(name)
    blockers = name_conditions(found, len(conditions))
    try:
        if not blockers and config.kind != "squeeze":
            check_files_of_problems(list(conditions.values()))
        check_folders(config, file)
    except RetrainError as error:
        blockers.append(str(error))
    return blockers


def find_notes(config: TrainConfig, runs: Sequence[Run]) -> list[str]:
    """How the run must be started, parts of a method that stay off, and what is not in the numbers."""
    start = [LAUNCH_NOTE] if needs_launch(config) else []
    if config.kind != "squeeze" and lacks_gpu(config):
        start.append(f'devices = "{config.backend.devices}" needs a GPU, and here is none; "auto" would take the CPU')
    conditions = split_conditions(config, "the campaign").values()
    assumed = dict.fromkeys(note for one in conditions for note in find_assumptions(one))
    return [*start, *find_idle_parts(config, runs), *assumed]


def find_idle_parts(config: TrainConfig, runs: Sequence[Run]) -> list[str]:
    """Parts of a method that stay off, for each condition of a campaign, and conditions that train in the same way."""
    if config.kind == "train":
        steps = steps_per_run(config)
        known = config.training.model_copy(update={"max_steps": steps, "epochs": 0.0})
        return find_idle(config.model_copy(update={"training": known})) if steps is not None else []
    idle = {run.condition: find_idle(run.config) for run in runs}
    notes = [f"{condition}: {note}" for condition, found in idle.items() for note in found]
    return [*notes, *find_limits(runs, config.campaign)]


def _engine(config: TrainConfig) -> JsonObject:
    backend = config.backend.backend
    if backend == "tinker":
        return {"name": "tinker", "url": config.model.base_url or None, "backend": backend, "devices": "the service"}
    inference = config.inference
    return {
        "name": inference.engine,
        "url": inference.url or None,
        "backend": backend,
        "devices": config.backend.devices,
    }


def _tasks(config: TrainConfig) -> str:
    """Where tasks and their rewards come from."""
    environment = config.environment
    if environment.provider:
        turns = f", at most {plural(environment.max_turns, 'turn')}" if environment.max_turns > 0 else ""
        return f"environment {environment.id or environment.provider} ({environment.provider}){turns}"
    rewards = "+".join(term.type for term in config.reward.terms) or config.reward.type
    named = config.teaching.student_model
    base = "the base model with the adapter off" if config.model.lora_rank else "a frozen copy of the model"
    student = f", answered by {f'the student {named}' if named else base}" if config.teaching.enabled else ""
    return f"data {config.data.source}, reward {rewards}{student}"


def _adapter(config: TrainConfig) -> JsonObject | None:
    if config.squeeze is None or config.kind != "squeeze":
        return None
    path = config.squeeze.adapter_path
    exists = None if path.startswith("tinker://") else Path(path).expanduser().is_dir()
    return {"path": path, "exists": exists, "min_variance_retention": config.squeeze.min_variance_retention}


def estimate_memory(config: TrainConfig, facts: ModelFacts) -> dict[str, int | None]:
    """Peak bytes of a step by part, on a GPU that is large enough; None where unknown."""
    work = workload_of(config, PROMPT_TOKENS)
    plan = memory_plan(facts, work)
    if plan is None:
        unknown: dict[str, int | None] = dict.fromkeys(f"{part}_bytes" for part in (*MEMORY_PARTS, "total"))
        weights = facts.parameters * work.width if facts.parameters is not None else None
        unplanned = dict.fromkeys(("frees_cache", "micro_batch_tokens", "recomputed_layers", "prompt_tokens"))
        return {**unknown, "weights_bytes": weights, **unplanned}
    return {
        **{f"{part}_bytes": int(vars(plan)[part]) for part in MEMORY_PARTS},
        "total_bytes": plan.total,
        "frees_cache": plan.frees_cache,
        "micro_batch_tokens": plan.training.micro_batch_tokens,
        "recomputed_layers": plan.training.recomputed_layers,
        "prompt_tokens": work.prompt_tokens,
    }


def list_files(config: TrainConfig) -> list[str]:
    """Files that will be written; `...` is filled in by the run."""
    log_dir = Path(config.logging.log_dir)
    if config.squeeze is not None and config.kind == "squeeze":
        return [f"{config.squeeze.output_path}/"] if config.squeeze.output_path else []
    names = [*_RUN_FILES]
    names += ["eval.jsonl", "eval_problems.jsonl"] if config.eval.every else []
    names += ["rollouts/step_....npz"] if config.training.record else []
    names += ["debug.jsonl"] if config.logging.debug else []
    # A service keeps the adapter; the checkpoints hold its address.
    has_adapter = any(one.backend.backend != "tinker" for one in split_conditions(config, "the campaign").values())
    if config.kind == "campaign":
        folder = str(Path(config.campaign_folder or log_dir.parent / "campaign_<date>_<time>"))
        names += [*(["adapter/"] if has_adapter else []), "stdout.log", "stderr.log"]
        own = [f"{folder}/manifest.json", f"{folder}/config.toml"]
        own += [f"{folder}/shared.log"] if config.campaign is not None and config.campaign.share_model else []
        return [*own, *(f"{folder}/runs/<condition>_s<seed>/{name}" for name in names)]
    return [*(f"{log_dir}/{name}" for name in names), *([f"{config.backend.adapter_path}/"] if has_adapter else [])]


def _plain(value: object) -> object:
    """Tuples, models and dates as JSON values, so that they compare and print alike."""
    plain: object = json.loads(json.dumps(value, default=_write))
    return plain


def _write(item: object) -> object:
    return item.model_dump(by_alias=True) if isinstance(item, BaseModel) else str(item)


def _shorten(value: object) -> str:
    """A value for the table; the conditions of a campaign do not fit a line, and runs are listed below."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return plural(len(value), "table")
    text = format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print(data: JsonObject) -> None:
    click.echo(f"{data['file']}: {_KINDS[data['kind']]}")
    for blocker in data["blockers"]:
        click.echo(f"cannot run here: {blocker}")
    for note in data["notes"]:
        click.echo(f"note: {note}")
    print_heading("Changes from the defaults")
    options = options_by_path()
    # A pipe has no header that says so.
    word = "" if sys.stdout.isatty() else "default "
    rows = [
        (options[change["path"]].where, _shorten(change["value"]), f"{word}{_shorten(change['default'])}")
        for change in data["changed"]
    ]
    print_table(("option", "value", "default"), rows or [("none", "", "")])
    print_heading("Summary")
    print_table(("what", "value"), _summary(data))
    if _differ(data["conditions"]):
        print_heading("Conditions")
        print_table(
            ("condition", "model", "per step", "steps", "time", "memory"), [*map(_condition_row, data["conditions"])]
        )
    if data["runs"]:
        turns = ", stepping in turn" if data["take_turns"] else ""
        print_heading(f"Runs ({len(data['runs'])}, {data['runs_at_once']} at a time{turns})")
        print_table(("run", "condition", "seed"), [(r["name"], r["condition"], str(r["seed"])) for r in data["runs"]])
    print_heading("Files that will be written")
    _print_files(data["files"])


def _print_files(files: Sequence[str]) -> None:
    """The files by folder, which is named once."""
    if not files:
        click.echo("  none: the analysis is printed")
    # A folder ends with a slash.
    homes = [os.path.dirname(file.rstrip("/")) for file in files]
    folder = max(homes, key=homes.count, default="")
    inside = [file.removeprefix(f"{folder}/") for file in files if folder and file.startswith(f"{folder}/")]
    for file in files:
        if not folder or not file.startswith(f"{folder}/"):
            click.echo(f"  {file}")
    if inside:
        click.echo(f"  {folder}/")
    for name in inside:
        click.echo(f"    {name}")


def _summary(data: JsonObject) -> list[tuple[str, str]]:
    adapter, model, engine, step, time = (data[key] for key in ("adapter", "model", "engine", "step", "time"))
    if adapter is not None:
        found = {True: "found", False: "MISSING", None: "to be downloaded"}[adapter["exists"]]
        return [
            ("adapter", f"{adapter['path']} ({found})"),
            ("analysis", f"the smallest rank that keeps {adapter['min_variance_retention']:.0%} of the variance"),
        ]
    parameters = f"{model['parameters']:,} (from {model['parameters_from']})" if model["parameters"] else "unknown"
    trainable = f"{model['trainable']:,}" if model["trainable"] is not None else "unknown"
    # A service has the weights.
    downloaded = "its tokenizer" if engine["backend"] == "tinker" else "it"
    return [
        ("condition", data["condition"] or _describe_conditions(data)),
        ("model", f"{model['name']} ({_FOUND[model['found']].format(what=downloaded)})"),
        ("parameters", parameters),
        ("trainable", trainable),
        ("tasks", data["problems"] or ""),
        ("engine", f"{engine['name']}{' at ' + engine['url'] if engine['url'] else ''}"),
        ("backend", f"{engine['backend']} on {_DEVICES.get(engine['devices'], engine['devices'])}"),
        ("completions", f"{step['completions']:,} per step ({plural(step['prompts'], 'prompt')})"),
        ("tokens", f"at most {step['max_tokens']:,} sampled per step{'' if step['turns'] else ' and turn'}"),
        ("steps", f"{time['steps']:,} per run" if time["steps"] is not None else UNKNOWN_STEPS),
        *([("seed", "drawn at the start")] if data["draws_seed"] else []),
        ("time", _describe_time(time)),
        *_memory_rows(data),
    ]


def _differ(conditions: Sequence[JsonObject]) -> bool:
    """Whether the runs of conditions differ in their size, not only in their method."""
    sizes = ({key: one[key] for key in ("model", "engine", "step", "memory")} for one in conditions)
    return len({json.dumps([size, one["time"]["steps"]]) for size, one in zip(sizes, conditions, strict=True)}) > 1


def _condition_row(one: JsonObject) -> tuple[str, ...]:
    step, time, memory = one["step"], one["time"], one["memory"]
    seconds = f"{time['step_seconds']} s per step" if time["step_seconds"] is not None else "unknown"
    known = memory["total_bytes"] if memory is not None else None
    return (
        one["name"],
        one["model"]["name"],
        f"{step['completions']:,} of {plural(step['prompts'], 'prompt')}, at most {step['max_tokens']:,} tokens",
        f"{time['steps']:,}",
        seconds,
        format_bytes(known) if known is not None else "unknown",
    )


def _describe_conditions(data: JsonObject) -> str:
    count = plural(len(data["conditions"]), "condition")
    if not _differ(data["conditions"]):
        return count
    return f"{count}; what follows is {max(data['conditions'], key=_most)['name']}, which needs most"


def _describe_time(time: JsonObject) -> str:
    if time["step_seconds"] is None:
        return str(time["from"])
    per_run = ""
    if time["run_seconds"] is not None:
        left_out = time["evaluations"] and time["evaluation_seconds"] is None
        per_run = f", {format_duration(time['run_seconds'])} per run{' without evaluations' if left_out else ''}"
    return f"{time['step_seconds']} s per step{per_run}, from {time['from']}"


def _memory_rows(data: JsonObject) -> list[tuple[str, str]]:
    memory = data["memory"]
    if memory is None:
        return [("memory", f"managed by {data['engine']['backend']}")]
    if memory["total_bytes"] is None:
        reason = why_shape_is_unknown(find_model(data["model"]["name"]))
        return [("weights", format_bytes(memory["weights_bytes"])), ("memory", f"unknown: {reason}")]
    parts = [(f"  {label}", format_bytes(memory[f"{part}_bytes"])) for part, label in MEMORY_LABELS.items()]
    layers = f", {plural(memory['recomputed_layers'], 'layer')} recomputed" if memory["recomputed_layers"] else ""
    freed = f"; {CACHE_IS_FREED}" if memory["frees_cache"] else ""
    return [
        ("memory", f"{format_bytes(memory['total_bytes'])}{freed}; `retrain plan` shows what fits a GPU"),
        *parts,
        ("micro-batches", f"{memory['micro_batch_tokens']:,} tokens{layers}"),
        ("prompts", f"{memory['prompt_tokens']} tokens are assumed; for others: retrain plan --prompt-tokens N"),
    ]
