"""What `retrain plan` prints, as JSON and as text."""

from __future__ import annotations

from typing import TypedDict

import click

from retrain.capacity.roofline import ROOFLINE_SHARE
from retrain.cli.console import print_heading, print_table
from retrain.cli.estimate import CACHE_IS_FREED, MEMORY_LABELS, UNKNOWN_STEPS
from retrain.modeling.files import find_model, why_shape_is_unknown
from retrain.runtime.devices import is_on_cpu
from retrain.runtime.text import format_bytes, format_duration, plural


class Model(TypedDict):
    """The model and its size; None where unknown."""

    name: str
    parameters: int | None
    parameters_from: str


class Step(TypedDict):
    """One step: its size, and its time as measured or by roofline."""

    completions: int
    turns: int | None
    """Maximum per completion; None if the environment decides, and `tokens` are those of one turn."""
    tokens: int
    seconds: float | None
    seconds_from: str | None
    roofline_sample_seconds: float | None
    roofline_train_seconds: float | None
    seconds_by_gpu: dict[str, float]
    """Roofline estimates for GPUs with the same memory, if only the memory of the GPU is known."""


class Run(TypedDict):
    """One run."""

    steps: int | None
    evaluations: int | None
    evaluation_seconds: float | None
    """Measured time of one evaluation."""
    seconds: float | None
    """Includes evaluations if their time was measured."""


class Campaign(TypedDict):
    """All runs of a campaign."""

    conditions: int
    seeds: int
    runs: int
    workers: int
    take_turns: bool
    """Whether only one of the workers steps at a time."""
    total_steps: int
    seconds: float | None


class Cost(TypedDict):
    """Tokens per step as a service bills them, and prices where given."""

    prefill_tokens: int
    sample_tokens: int
    train_tokens: int
    tokens_from: str
    price: float | None
    run_price: float | None
    run_price_includes: str
    campaign_price: float | None


class Plan(TypedDict):
    """What `retrain plan --json` prints; None where a part is unknown or does not apply."""

    file: str
    backend: str
    devices: str
    notes: list[str]
    model: Model
    gpu: dict[str, str | float] | None
    memory: dict[str, int | bool | None] | None
    sampling: dict[str, str | int | bool | None] | None
    training: dict[str, int] | None
    largest_batch_size: int | None
    step: Step
    run: Run
    campaign: Campaign | None
    cost: Cost | None


def print_plan(data: Plan) -> None:
    """Print the plan as text."""
    gpu, backend, memory, training = data["gpu"], data["backend"], data["memory"], data["training"]
    device = "the CPU" if is_on_cpu(data["devices"]) else "an unknown GPU (try --gpu H100)"
    if gpu and gpu["memory"]:
        device = f"{gpu['name']}, {gpu['memory']:.0f} GB"
    click.echo(f"{data['file']}: {data['model']['name']} on {device if backend == 'local' else backend}")
    for note in data["notes"]:
        click.echo(f"note: {note}")
    print_heading("Peak memory")
    if backend != "local":
        click.echo(f"  managed by {backend}")
    elif memory is None or training is None:
        click.echo(f"  unknown: {why_shape_is_unknown(find_model(data['model']['name']))}")
    else:
        fits = "" if memory["fits"] is None else "  fits" if memory["fits"] else "  DOES NOT FIT"
        rows = [(label, format_bytes(memory[part])) for part, label in MEMORY_LABELS.items()]
        rows += [(f"peak while {phase}", format_bytes(memory[f"{phase}_peak"])) for phase in ("sampling", "training")]
        print_table(("part", "memory"), [*rows, ("total", format_bytes(memory["total"]) + fits)])
        for line in _memory_lines(data):
            click.echo(line)
        layers = training["recomputed_layers"] or "none"
        click.echo(f"micro-batches of {training['micro_batch_tokens']:,} tokens; layers recomputed: {layers}")
        click.echo(f"prompts are assumed to have {training['prompt_tokens']:,} tokens (--prompt-tokens)")
    if data["largest_batch_size"] is not None:
        click.echo(f"largest batch_size that is sampled at once: {data['largest_batch_size']:,}")
    print_heading("Time")
    print_table(("what", "value"), _time_rows(data))
    if data["cost"] is not None:
        print_heading("Cost")
        print_table(("what", "value"), _cost_rows(data["cost"]))


_MERGING = {
    "copies": "merged into copies of the adapted matrices",
    "in-place": "merged in place; the matrices are restored from host memory",
    "never": "not merged",
}


def _memory_lines(data: Plan) -> list[str]:
    """How sampling will use memory, as far as it is not the plain case."""
    sampling, completions = data["sampling"], data["step"]["completions"]
    if sampling is None:
        return []
    lines = [f"adapter: {_MERGING[str(sampling['merging'])]}"] if sampling["merging"] else []
    at_once = sampling["completions_at_once"]
    if at_once != completions:
        lines.append(f"sampled at once, at full length: {at_once} of {completions} completions; the others take turns")
    if sampling["frees_cache"]:
        lines.append(CACHE_IS_FREED)
    return lines


def _time_rows(data: Plan) -> list[tuple[str, str]]:
    step, run, campaign = data["step"], data["run"], data["campaign"]
    each = " per turn" if step["turns"] is None else ""
    size = f"{plural(step['completions'], 'completion')}, at most {step['tokens']:,} tokens sampled{each}"
    rows = [("per step", size)]
    if step["seconds"] is None:
        reason = "the model's shape is unknown" if data["memory"] is None else "the GPU is unknown.  Try: --gpu"
        # --max-steps would shorten every run of a campaign.
        hint = "Try: run it for 5 steps (--max-steps 5)" if campaign is None else "Try: start it, and plan again"
        if is_on_cpu(data["devices"]):
            reason = f"CPUs differ too much to estimate one.  {hint}"
        if data["backend"] != "local":
            reason = f"the hardware of {data['backend']} is unknown.  {hint}"
        like = "with this model, device and size (batch_size, group_size, max_tokens)"
        unknown = f"unknown: no step {like} has been measured, and {reason}"
        by_gpu = ", ".join(f"{_format_step(seconds)} on {name}" for name, seconds in step["seconds_by_gpu"].items())
        rows.append(("seconds per step", f"{by_gpu}; by roofline, at {ROOFLINE_SHARE:.0%}" if by_gpu else unknown))
    else:
        rows.append(("seconds per step", f"{_format_step(step['seconds'])}, from {step['seconds_from']}"))
    if run["evaluations"] and run["evaluation_seconds"] is not None:
        rows.append(("per evaluation", f"{format_duration(run['evaluation_seconds'])}, {run['evaluations']} per run"))
    rows += _run_rows(run)
    if campaign is not None:
        wall = f", {format_duration(campaign['seconds'])} {_left_out(run)}" if campaign["seconds"] is not None else ""
        matrix = (plural(campaign["conditions"], "condition"), plural(campaign["seeds"], "seed"))
        # Conditions may have steps of their own.
        is_product = campaign["runs"] * (run["steps"] or 0) == campaign["total_steps"]
        product = " × ".join((*matrix, plural(run["steps"] or 0, "step")) if is_product else matrix)
        turns = ", stepping in turn" if campaign["take_turns"] else ""
        runs = f"{plural(campaign['workers'], 'run')} at a time{turns}"
        total = f"{product} = {plural(campaign['total_steps'], 'step')}, {runs}"
        rows.append(("per campaign", f"{total}{wall}"))
    return rows


def _format_step(seconds: float) -> str:
    """The seconds of a step, with the decimals that matter."""
    if seconds < 0.005:
        return "< 0.01"
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _run_rows(run: Run) -> list[tuple[str, str]]:
    if run["steps"] is None:
        return [("steps per run", UNKNOWN_STEPS)]
    if run["seconds"] is None:
        return []
    return [("per run", f"{plural(run['steps'], 'step')}, {format_duration(run['seconds'])} {_left_out(run)}")]


def _left_out(run: Run) -> str:
    """What the time of a run does not include."""
    has_more = run["evaluations"] and run["evaluation_seconds"] is None
    return f"without start-up{' and evaluations' if has_more else ''}"


def _cost_rows(cost: Cost) -> list[tuple[str, str]]:
    tokens = f"{cost['prefill_tokens']:,} prompt, {cost['sample_tokens']:,} sampled, {cost['train_tokens']:,} trained"
    rows = [("tokens per step", f"{tokens}; {cost['tokens_from']}")]
    if cost["price"] is None:
        rows.append(("price", "unknown: --prefill-price, --sample-price and --train-price were not given"))
    else:
        rows.append(("per step", f"{cost['price']:.4f}"))
    if cost["run_price"] is not None:
        included = f", {cost['run_price_includes']} included" if cost["run_price_includes"] else ""
        rows.append(("per run", f"{cost['run_price']:.2f}{included}"))
    if cost["campaign_price"] is not None:
        rows.append(("per campaign", f"{cost['campaign_price']:.2f}"))
    return rows
