"""`retrain doctor`: what is installed and what a configuration needs, with the command that mends each miss.

Versions come from package metadata. What only trying tells is tried, in processes of their own: whether CUDA works,
whether plug-ins can be imported and the tokenizer be loaded, whether servers answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from retrain.checks.preflight import (
    find_obstacles,
    has_wandb_key,
    hub_answers,
    hub_url,
    is_offline,
    problem_with_tinker_key,
)
from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.packages import check_package, pip_install, requirements
from retrain.cli.train import DEFAULT_FILE, find_config, load_environment, show_notes
from retrain.cli.trial import Trial, try_out
from retrain.config import TrainConfig, load_config
from retrain.config.absent import find_absent_parts
from retrain.config.flags import click_options, overrides_from
from retrain.modeling.files import find_model

_LITTLE_SPACE = 5_000_000_000
_PROBE_SECONDS = 120
_PROBE = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    gpus.append([torch.cuda.get_device_name(index), free, total])
print(json.dumps({"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "gpus": gpus}))
"""

Test = Callable[[TrainConfig], bool]


@dataclass(frozen=True)
class Check:
    """One line of the report. `missing` is what the configuration needs and does not get."""

    group: str
    name: str
    status: Literal["ok", "warning", "missing", "unused"]
    detail: str
    fix: str = ""


# Package -> the option that needs it, and when. Core packages come with every install, the others with an extra.
_PACKAGES: dict[str, tuple[str, Test]] = {
    "torch": ('[backend] backend = "local"', lambda c: c.backend.backend == "local"),
    "transformers": ('[backend] backend = "local"', lambda c: c.backend.backend == "local"),
    "peft": ("[model] lora_rank", lambda c: c.backend.backend == "local" and c.model.lora_rank > 0),
    "datasets": ("[data] source", lambda c: not c.environment.provider and c.data.source in ("math", "gsm8k", "hub")),
    "math-verify": ('[reward] type = "math"', lambda c: "math" in (c.reward.type, *(t.type for t in c.reward.terms))),
    "verifiers": ('[environment] provider = "verifiers"', lambda c: c.environment.provider == "verifiers"),
    "reasoning-gym": ('[environment] provider = "reasoning_gym"', lambda c: c.environment.provider == "reasoning_gym"),
    "wandb": ("[logging] wandb_project", lambda c: bool(c.logging.wandb_project)),
    "trackio": ("[logging] trackio_project", lambda c: bool(c.logging.trackio_project)),
    "sentence-transformers": ('[planning] detector = "semantic"', lambda c: c.planning.detector == "semantic"),
    "tinker": ('[backend] backend = "tinker"', lambda c: c.backend.backend == "tinker"),
    "ray": ('[campaign] executor = "ray"', lambda c: c.campaign is not None and c.campaign.executor == "ray"),
    "deepspeed": ("[distributed] zero_stage", lambda c: c.distributed.zero_stage > 0),
}
# Variable -> what it is for, when a run cannot do without it, and where one gets it. Values are never shown.
_KEYS: dict[str, tuple[str, Test, str]] = {
    "HF_TOKEN": ("gated models and datasets", lambda c: False, ""),
    "WANDB_API_KEY": (
        "[logging] wandb_project",
        lambda c: bool(c.logging.wandb_project) and not has_wandb_key(),
        "wandb login, or put WANDB_API_KEY=... into .env",
    ),
    "TINKER_API_KEY": (
        '[backend] backend = "tinker"',
        lambda c: c.backend.backend == "tinker" and bool(problem_with_tinker_key()),
        "put TINKER_API_KEY=... into .env",
    ),
    "OPENAI_API_KEY": (
        '[reward] type = "judge"',
        lambda c: "judge" in (c.reward.type, *(t.type for t in c.reward.terms)) and not _own_judge(c),
        "put OPENAI_API_KEY=... into .env",
    ),
}


@click.command(
    "doctor", short_help="Check this machine and say how to mend it.", context_settings={"max_content_width": 110}
)
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: {ok, file, checks: [group, name, status, detail, fix]}."
)
def command(config: str | None, as_json: bool, **parameters: Any) -> int:
    """Check this machine against CONFIG (./retrain.toml when it is left out), with any flags that training takes.

    Exits 1 when something that the configuration needs is missing. Without any configuration only the installation is
    checked.
    """
    load_environment(announce=not as_json)
    overrides = overrides_from(parameters)
    has_file = config is not None or "resume.from" in overrides or Path(DEFAULT_FILE).exists()
    path = find_config(config, overrides) if has_file else None
    loaded = load_config(path, overrides) if has_file or overrides else None
    if loaded is not None:
        show_notes(loaded)
    checks = list(run_checks(loaded))
    ok = all(check.status != "missing" for check in checks)
    if as_json:
        print_json({"ok": ok, "file": str(path) if path else None, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, str(path) if path else "the installation alone; name a configuration to check what it needs")
    return 0 if ok else 1


command.params.extend(click_options())


def run_checks(config: TrainConfig | None) -> Iterator[Check]:
    """Every check, in the order of the report; those of a configuration only when there is one."""
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(try_out, config) if config is not None else None
        yield _check_python()
        yield from _check_gpus(config)
        yield from _check_packages(config)
        yield from _check_keys(config)
        trials = trying.result() if trying is not None else []
    if config is None:
        return
    yield from _check_parts(config, trials)
    if config.kind != "squeeze":
        yield _check_model(config, config.model.model)
        if config.teaching.student_model:
            student = config.teaching.student_model
            yield _check_model(config, student, "student", "[teaching] student_model")
    yield from _check_inputs(config)
    yield from _check_disk(config)


def _check_python() -> Check:
    return Check("system", "python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")


def _check_packages(config: TrainConfig | None) -> Iterator[Check]:
    known = requirements()
    for name, (why, is_needed) in _PACKAGES.items():
        requirement = known.get(name)
        text = requirement.text if requirement else name
        found, problem = check_package(name, text)
        core = requirement is not None and not requirement.extra
        needed = is_needed(config) if config is not None else core
        if not problem:
            yield Check("packages", name, "ok", found)
        elif needed:
            yield Check("packages", name, "missing", f"{problem}; needed by {why}", pip_install(text))
        else:
            fix = pip_install(text) if core or config is None else ""
            yield Check("packages", name, "warning" if core else "unused", f"{problem}; for {why}", fix)


def _check_gpus(config: TrainConfig | None) -> Iterator[Check]:
    state = probe_torch()
    devices = config.backend.devices if config is not None and config.backend.backend == "local" else ""
    wanted = [int(name.strip()[4:]) for name in devices.split(",") if name.strip().startswith("gpu:")]
    if "error" in state:
        yield Check("system", "torch", "missing" if wanted else "warning", str(state["error"]), pip_install("torch"))
        return
    cuda = f"CUDA {state['cuda']}" if state["cuda"] else "built without CUDA"
    yield Check("system", "torch CUDA", "ok", f"{cuda}, {'a GPU is' if state['available'] else 'no GPU is'} usable")
    for index, (name, free, total) in enumerate(state["gpus"]):
        yield Check("system", f"gpu:{index}", "ok", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    for index in wanted:
        if index >= len(state["gpus"]):
            yield Check("system", f"gpu:{index}", "missing", "[backend] devices asks for it", _mend_gpu(state))


def _mend_gpu(state: dict[str, Any]) -> str:
    if state["gpus"]:
        return 'set [backend] devices = "gpu:0", or --devices gpu:0'
    if shutil.which("nvidia-smi") and not state["cuda"]:
        return f"{pip_install('torch')} --force-reinstall --index-url https://pypi.org/simple"
    return 'set [backend] devices = "cpu", or --devices cpu'


def probe_torch() -> dict[str, Any]:
    """What PyTorch says of CUDA, or {"error": why it says nothing}. A broken driver can only end the other process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {_PROBE_SECONDS} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["torch could not be imported"])[-1]}
    state: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return state


def _check_keys(config: TrainConfig | None) -> Iterator[Check]:
    for name, (why, is_needed, fix) in _KEYS.items():
        if os.environ.get(name):
            yield Check("keys", name, "ok", "set")
        elif config is not None and is_needed(config):
            yield Check("keys", name, "missing", f"not set; needed by {why}", fix)
        else:
            yield Check("keys", name, "unused", f"not set; for {why}")


def _own_judge(config: TrainConfig) -> bool:
    """Whether the judge is not OpenAI's own server: one of your own may take no key."""
    return bool(config.reward.judge_base_url or os.environ.get("OPENAI_BASE_URL"))


def _check_parts(config: TrainConfig, trials: list[Trial]) -> Iterator[Check]:
    """Choices that nothing here honours, what does not fit the model, and how trying things out went."""
    too_long = (problem for problem in find_obstacles(config) if problem.where == "[training] max_tokens")
    for problem in (*find_absent_parts(config), *(too_long if config.kind != "squeeze" else ())):
        yield Check("parts", problem.where, "missing", problem.text, problem.hint)
    for trial in trials:
        detail, _, fix = trial.problem.partition("Try: ")
        if trial.problem:
            yield Check("parts", trial.where, "missing", detail.strip(), fix or f"check {trial.where}")
        else:
            yield Check("parts", trial.where, "ok" if trial.is_known else "warning", trial.detail)


def _check_model(config: TrainConfig, name: str, what: str = "model", where: str = "[model] model") -> Check:
    files = find_model(name)
    if files.folder is not None:
        return Check("files", what, "ok", f"{name} ({files.folder})")
    if files.found == "missing":
        return Check("files", what, "missing", f"no such folder: {name}", f"set {where} to one that exists")
    if config.backend.backend == "tinker":
        return Check("files", what, "ok", f"{name} (the service has it)")
    if is_offline():
        fix = f"HF_HUB_OFFLINE=0 hf download {name}"
        return Check("files", what, "missing", f"{name} is not in the cache and HF_HUB_OFFLINE is set", fix)
    if not hub_answers():
        fix = f"download it elsewhere and set {where} to its folder"
        return Check("files", what, "missing", f"{name} is not in the cache and {hub_url()} cannot be reached", fix)
    return Check("files", what, "warning", f"{name} is not in the cache; the run downloads it", f"hf download {name}")


def _check_inputs(config: TrainConfig) -> Iterator[Check]:
    """Files and folders that the configuration reads."""
    adapter = config.squeeze.adapter_path if config.kind == "squeeze" and config.squeeze is not None else ""
    state = str(Path(config.resume.from_) / "trainer_state.json") if config.resume.from_ else ""
    for where, path in (
        ("[data] path", config.data.path),
        ("[eval] path", config.eval.path),
        ("[squeeze] adapter_path", "" if "://" in adapter else adapter),
        ("[resume] from", state),
    ):
        if path and Path(path).expanduser().exists():
            yield Check("files", where, "ok", path)
        elif path:
            yield Check("files", where, "missing", f"{path} does not exist", f"set {where} to what exists")


def _check_disk(config: TrainConfig) -> Iterator[Check]:
    for where, path in (
        ("[logging] log_dir", config.logging.log_dir),
        ("[backend] adapter_path", config.backend.adapter_path),
    ):
        folder = Path(path).expanduser().absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            yield Check("files", where, "missing", f"{folder} cannot be written to", f"set {where} to another folder")
            continue
        free = shutil.disk_usage(folder).free
        status: Literal["ok", "warning"] = "ok" if free >= _LITTLE_SPACE else "warning"
        fix = "" if status == "ok" else f"free some space, or set {where} to another disk"
        yield Check("files", where, status, f"{path}: {free / 1e9:.1f} GB free", fix)


def _print(checks: list[Check], source: str) -> None:
    click.echo(f"Checked: {source}")
    for group in dict.fromkeys(check.group for check in checks):
        print_heading(group)
        rows = [(c.status, c.name, c.detail) for c in checks if c.group == group]
        print_table(("status", "what", "found"), rows)
    mendable = [check for check in checks if check.fix]
    if mendable:
        print_heading("How to install or mend")
        print_table(("status", "what", "do this"), [(c.status, c.name, c.fix) for c in mendable])
    missing = sum(check.status == "missing" for check in checks)
    click.echo(f"\n{missing} missing." if missing else "\nNothing is missing.")
