"""`retrain doctor`: what is installed and what a configuration needs, with the fix for each problem.

Versions come from package metadata. CUDA, plugins, tokenizers and servers are tried out in separate processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

import click

from retrain.campaign.plan import split_conditions
from retrain.campaign.progress import is_locked
from retrain.checks.keys import find_wandb_issues, missing_keys
from retrain.checks.preflight import (
    find_damaged_weights,
    find_missing_model,
    find_missing_weights,
    find_obstacles,
    hub_answers,
    hub_url,
    is_offline,
    packages_by_option,
    reads_weights,
)
from retrain.checks.processes import LAUNCH_NOTE, needs_launch
from retrain.checks.unsupported import find_unsupported
from retrain.cli.console import announce_if_slow, print_heading, print_json, print_table
from retrain.cli.estimate import check_log_dir, check_resumed, list_runs
from retrain.cli.train import DEFAULT_FILE, load_environment, read_config, strict_option
from retrain.cli.trial import Trial, start_trials
from retrain.config import TrainConfig
from retrain.config.flags import click_options, load_with_flags, overrides_from
from retrain.data import load_examples, reads_file
from retrain.errors import ConfigIssue, RetrainError
from retrain.isolation.redaction import redact
from retrain.modeling.files import (
    find_lacking_files,
    find_model,
)
from retrain.runtime.child import python_command
from retrain.runtime.packages import check_package, install_command, requirements
from retrain.runtime.permissions import is_writable_folder, nearest_existing
from retrain.runtime.text import list_some, plural
from retrain.storage.publishing import other_run, why_kept

_LOW_DISK_SPACE = 5_000_000_000
_PROBE_SECONDS = 120
_PROBE = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    gpus.append([torch.cuda.get_device_name(index), free, total])
print(json.dumps({"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "gpus": gpus}))
"""


@dataclass(frozen=True)
class Check:
    """One line of the report. `missing` is something that the configuration needs."""

    group: str
    name: str
    status: Literal["ok", "warning", "missing", "unused"]
    detail: str
    fix: str = ""


class TorchState(TypedDict):
    """What PyTorch reports about CUDA; of each GPU its name, free and total bytes."""

    cuda: str | None
    available: bool
    gpus: list[tuple[str, int, int]]


# Environment variables and their purpose. Values are never shown.
_KEYS = {
    "HF_TOKEN": "gated models and datasets",
    "WANDB_API_KEY": "[logging] wandb_project",
    "TINKER_API_KEY": '[backend] backend = "tinker"',
    "OPENAI_API_KEY": '[reward] type = "judge"',
    "INFERENCE_API_KEY": "an inference server that asks for one",
}


# Packages that a command needs, whatever the configuration.
_PACKAGES_OF_COMMANDS = {
    "trl": "retrain.grpo",
    "hydra-core": "retrain grpo",
    "deepspeed": "retrain grpo with ZeRO",
    "matplotlib": "retrain card",
    "gguf": "retrain import-gguf",
}


@click.command(
    "doctor",
    short_help="Check this machine and show fixes.",
    context_settings={"max_content_width": 110},
)
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: {ok, file, checks: [group, name, status, detail, fix]}."
)
@strict_option
def command(config: str | None, as_json: bool, strict: bool, **parameters: object) -> int:
    """Check that this machine has what CONFIG (default: ./retrain.toml) needs.

    Exits with 1 if something is missing. Without a configuration, only the installation is checked. All flags of
    training are accepted as well: see `retrain help`.
    """
    path: Path | None = None
    loaded: TrainConfig | None = None
    overrides = overrides_from(parameters)
    if config is not None or "resume.from" in overrides or Path(DEFAULT_FILE).exists():
        path, loaded = read_config(config, parameters, as_json, strict)
        list_runs(loaded, str(path))  # rejects conditions that cannot be run together
    else:
        load_environment(announce=not as_json)
        loaded = load_with_flags(None, overrides) if overrides else None
    with announce_if_slow("Importing PyTorch and testing the configured components ..."):
        # Errors of third-party code may contain secrets.
        checks = [replace(one, detail=redact(one.detail), fix=redact(one.fix)) for one in run_checks(loaded)]
    ok = all(check.status != "missing" for check in checks)
    if as_json:
        print_json({"ok": ok, "file": str(path) if path else None, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, str(path) if path else "the installation only; pass a configuration to check what it needs")
    return 0 if ok else 1


command.params.extend(click_options(listed=()))


def run_checks(config: TrainConfig | None) -> Iterator[Check]:
    """Every check in the order of the report; those of a configuration only when there is one."""
    with start_trials(config) if config is not None else nullcontext(list) as wait:
        yield Check("system", "python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
        # An analysis of an adapter reads no other table, and needs the core packages only.
        trained = split_conditions(config, "the campaign") if config is not None else {}
        yield from _check_gpus(trained.values())
        yield from _check_packages(list(trained.values()), config is None)
        yield from _check_keys(trained.values())
        trials: list[Trial] = wait()
    if config is None:
        return
    yield from _check_parts(config, trained, trials)
    # A service has models of its own, which its trial asks for.
    here = [one for one in trained.values() if one.backend.backend != "tinker"]
    yield from (_check_model(*of) for of in dict.fromkeys((one.model.model, reads_weights(one)) for one in here))
    students = ((one.teaching.student_model, reads_weights(one)) for one in here if one.teaching.student_model)
    yield from (_check_model(*of, "student", "[teaching] student_model") for of in dict.fromkeys(students))
    yield from dict.fromkeys(check for one in trained.values() or [config] for check in _check_inputs(one))
    yield from _check_earlier(config)
    yield from _check_disk(config)


def _check_packages(configs: Sequence[TrainConfig], of_installation: bool) -> Iterator[Check]:
    known = requirements()
    by_command = {name: {use: False} for name, use in _PACKAGES_OF_COMMANDS.items()}
    by_option: dict[str, dict[str, bool]] = {}
    for config in configs or (None,):
        for name, settings in packages_by_option(config).items():
            uses = by_option.setdefault(name, {})
            uses.update({where: is_set or uses.get(where, False) for where, is_set in settings.items()})
    for name, settings in (by_option | by_command).items():
        requirement = known.get(name)
        text = requirement.text if requirement else name
        found, problem = check_package(name, text)
        core = requirement is not None and not requirement.extra
        set_here = [where for where, is_set in settings.items() if is_set]
        why = (set_here or list(settings))[0]
        needed = bool(set_here) if configs else core
        if not problem:
            yield Check("packages", name, "ok", found)
        elif needed:
            yield Check("packages", name, "missing", f"{problem}; needed by {why}", install_command(name))
        else:
            fix = install_command(name) if core or of_installation else ""
            yield Check("packages", name, "warning" if core else "unused", f"{problem}; for {why}", fix)


def _check_gpus(configs: Iterable[TrainConfig]) -> Iterator[Check]:
    state = probe_torch()
    devices = ",".join(config.backend.devices for config in configs if config.backend.backend == "local")
    requested = sorted({int(name.strip()[4:]) for name in devices.split(",") if name.strip().startswith("gpu:")})
    if isinstance(state, str):
        yield Check("system", "torch", "missing" if requested else "warning", state, install_command("torch"))
        return
    cuda = f"CUDA {state['cuda']}" if state["cuda"] else "built without CUDA"
    yield Check("system", "torch CUDA", "ok", f"{cuda}, {'a GPU' if state['available'] else 'no GPU'} available")
    for index, (name, free, total) in enumerate(state["gpus"]):
        yield Check("system", f"gpu:{index}", "ok", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    for index in requested:
        if index >= len(state["gpus"]):
            yield Check("system", f"gpu:{index}", "missing", "required by [backend] devices", _fix_gpu(state))


def _fix_gpu(state: TorchState) -> str:
    if state["gpus"]:
        return 'set [backend] devices = "gpu:0", or --devices gpu:0'
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if state["cuda"] and hidden is not None:
        return f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r} and may hide GPUs, or set --devices cpu"
    if shutil.which("nvidia-smi") and not state["cuda"]:
        return f"{install_command('torch')} --force-reinstall --index-url https://pypi.org/simple"
    return 'set [backend] devices = "cpu", or --devices cpu'


def probe_torch() -> TorchState | str:
    """The CUDA state or an error message, from a separate process because a broken driver can crash it."""
    try:
        done = subprocess.run(
            [*python_command(), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing torch took more than {_PROBE_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["torch could not be imported"])[-1]
    state: TorchState = json.loads(done.stdout.splitlines()[-1])
    return state


def _check_keys(configs: Iterable[TrainConfig]) -> Iterator[Check]:
    missing = {name: issue for config in configs for name, issue in missing_keys(config)}
    for name, why in _KEYS.items():
        if name in missing:
            state = "not valid" if os.environ.get(name) else "not set"
            fix = missing[name].hint.removeprefix("Try: ")
            yield Check("keys", name, "missing", f"{state}; needed by {why}", fix)
        elif os.environ.get(name):
            yield Check("keys", name, "ok", "set")
        else:
            yield Check("keys", name, "unused", f"not set; for {why}")


def _split_fix(problem: str, otherwise: str) -> tuple[str, str]:
    """What is wrong, and how to fix it."""
    detail, _, fix = problem.partition("Try: ")
    question = re.search(r"Did you mean .*\?", detail)
    return detail.strip(), fix or (question[0] if question else otherwise)


_CHECKED_HERE = ("[training]", "[backend] adapter_path", "[inference] attention_kernel", "[inference] dtype")


def _check_parts(config: TrainConfig, trained: Mapping[str, TrainConfig], trials: list[Trial]) -> Iterator[Check]:
    """Unsupported choices, problems that have no other check, such as completions that are too long, and trials."""
    found: dict[ConfigIssue, list[str]] = {}
    for name, one in trained.items():
        others = (problem for problem in find_obstacles(one) if problem.where.startswith(_CHECKED_HERE))
        for problem in (*find_unsupported(one), *find_wandb_issues(one), *others):
            found.setdefault(problem, []).append(name)
    for problem, names in found.items():
        of = "" if len(names) == len(trained) else f" ({list_some(names)})"
        yield Check("components", problem.where, "missing", f"{problem.text}{of}", problem.hint.removeprefix("Try: "))
    if needs_launch(config):
        yield Check("components", "[distributed] fsdp", "warning", LAUNCH_NOTE)
    # Conditions that differ in something else may have the same result.
    for trial in dict.fromkeys(trials):
        if trial.problem:
            yield Check("components", trial.where, "missing", *_split_fix(trial.problem, f"check {trial.where}"))
        elif trial.is_warning:
            yield Check("components", trial.where, "warning", *_split_fix(trial.detail, ""))
        elif trial.detail:
            yield Check("components", trial.where, "ok", trial.detail)


def _check_model(name: str, reads: bool, what: str = "model", where: str = "[model] model") -> Check:
    """`reads`: whether its weights are read."""
    files = find_model(name)
    finders = (find_missing_model, *((find_missing_weights,) if reads else ()), find_damaged_weights)
    broken = next((issue for find in finders for issue in find(where, name)), None)
    if broken is not None and (files.folder is not None or files.found == "file"):
        return Check("files", what, "missing", broken.text.removeprefix("= "), broken.hint.removeprefix("Try: "))
    if files.found == "cache" and reads and (lacking := find_lacking_files(files)) and not is_offline():
        text, fix = f"{name} is incomplete in the cache: it lacks {list_some(lacking)}", f"hf download {name}"
        if hub_answers():
            return Check("files", what, "warning", f"{text}, which the run downloads", fix)
        return Check("files", what, "missing", f"{text}, and {hub_url()} cannot be reached", fix)
    if files.folder is not None:
        return Check("files", what, "ok", f"{name} ({files.folder})")
    if files.found == "missing":
        return Check("files", what, "missing", f"no such folder: {name}", f"set {where} to an existing folder")
    if is_offline():
        fix = f"HF_HUB_OFFLINE=0 hf download {name}"
        return Check("files", what, "missing", f"{name} is not in the cache and HF_HUB_OFFLINE is set", fix)
    if not hub_answers():
        fix = f"download it elsewhere and set {where} to its folder, or to builtin:tiny for a first try"
        return Check("files", what, "missing", f"{name} is not in the cache and {hub_url()} cannot be reached", fix)
    return Check("files", what, "warning", f"{name} is not in the cache; the run downloads it", f"hf download {name}")


def _check_inputs(config: TrainConfig) -> Iterator[Check]:
    inputs = {"[data] path": config.data.path, "[eval] path": config.eval.path}
    if config.squeeze is not None and config.kind == "squeeze":
        adapter = config.squeeze.adapter_path
        inputs = {"[squeeze] adapter_path": "" if "://" in adapter else adapter}
    for where, path in inputs.items():
        if path and Path(path).expanduser().exists():
            yield _check_rows(config, where, path) if where in _DATA_FILES else Check("files", where, "ok", path)
        elif path:
            yield Check("files", where, "missing", f"{path} does not exist", f"set {where} to an existing path")


def _check_earlier(config: TrainConfig) -> Iterator[Check]:
    """Whether the run to resume, or the campaign in the folder, can be continued, or else a new one can begin there."""
    path = config.resume.from_
    where = "[resume] from" if path else "[logging] log_dir"
    try:
        check_resumed(config, "the campaign")
        check_log_dir(config)
    except RetrainError as error:
        other = f"set {where} to {'a run' if path else 'another folder'}"
        yield Check("files", where, "missing", *_split_fix(" ".join(str(error).split()), other))
        return
    if path:
        yield Check("files", where, "ok", path)


_DATA_FILES = ("[data] path", "[eval] path")


def _check_rows(config: TrainConfig, where: str, path: str) -> Check:
    """Load a file of problems as the run would."""
    source = config.data.source if where == "[data] path" else config.held_out_source
    section = config.data.model_copy(update={"source": source, "path": path})
    if not reads_file(source):
        return Check("files", where, "ok", path)
    try:
        count = len(load_examples(section))
    except RetrainError as error:
        problem = " ".join(str(error).split())
        return Check("files", where, "missing", *_split_fix(problem, f"fix the file, or set {where} to another"))
    is_cut = where == "[eval] path" and config.eval.every and config.eval.max_examples < count
    cut = f", {config.eval.max_examples} of them evaluated" if is_cut else ""
    if where == "[eval] path" and not config.eval.every:
        cut = ", not evaluated: [eval] every is 0"
    return Check("files", where, "ok", f"{path} ({plural(count, 'example')}{cut})")


def _written_folders(config: TrainConfig) -> Iterator[tuple[str, str]]:
    if config.squeeze is not None and config.kind == "squeeze":
        if config.squeeze.output_path:
            yield "[squeeze] output_path", config.squeeze.output_path
        return
    if config.kind == "campaign":  # whose runs have their own adapters
        yield "[logging] log_dir", config.campaign_folder or str(Path(config.logging.log_dir).parent)
    else:
        yield "[logging] log_dir", config.logging.log_dir
        if config.backend.backend != "tinker":  # which keeps the adapter
            yield "[backend] adapter_path", config.backend.adapter_path


def _check_disk(config: TrainConfig) -> Iterator[Check]:
    log_dir = Path(config.logging.log_dir).expanduser()
    for where, path in _written_folders(config):
        folder = nearest_existing(Path(path))
        if not is_writable_folder(folder):
            fix = f"set {where} to another folder"
            if where == "[backend] adapter_path":
                found = f"{folder} cannot be written to, so adapters stay in the checkpoints"
                yield Check("files", where, "warning", found, fix)
            else:
                yield Check("files", where, "missing", f"{folder} cannot be written to", fix)
            continue
        free = shutil.disk_usage(folder).free
        status: Literal["ok", "warning"] = "ok" if free >= _LOW_DISK_SPACE else "warning"
        fix = "" if status == "ok" else f"free some space, or set {where} to another disk"
        found = f"{path}: {free / 1e9:.1f} GB free"
        if where == "[backend] adapter_path":
            target = Path(path).expanduser()
            kept, other = why_kept(target), other_run(target, log_dir)
            if kept or other:
                status, fix = "warning", f"set {where} to another folder, such as {config.logging.log_dir}/adapter"
                found += f"; {kept}, so adapters stay in the checkpoints" if kept else ""
                found += f"; holds the adapter of {other}, which a run replaces" if other else ""
        if where == "[logging] log_dir" and is_locked(Path(path).expanduser()):
            status, fix = "warning", f"wait for it to end, or set {where} to another folder"
            found += "; a run is using it, and until it ends another one is refused"
        yield Check("files", where, status, found, fix)


def _print(checks: list[Check], source: str) -> None:
    click.echo(f"Checked: {source}")
    for group in dict.fromkeys(check.group for check in checks):
        print_heading(group)
        rows = [(c.status, c.name, c.detail) for c in checks if c.group == group]
        print_table(("status", "what", "found"), rows)
    fixable = [check for check in checks if check.fix]
    if fixable:
        print_heading("Fixes")
        print_table(("status", "what", "fix"), [(c.status, c.name, c.fix) for c in fixable])
    missing = sum(check.status == "missing" for check in checks)
    click.echo(f"\n{missing} missing." if missing else "\nNothing is missing.")
