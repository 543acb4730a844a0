"""`retrain plan`: the memory that a run needs by part, the largest batch that fits a GPU, wall time and cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypedDict

import click

from retrain.capacity.cost import Prices, evaluation_tokens, logged_tokens, max_tokens_per_step
from retrain.capacity.memory import PROMPT_TOKENS, Shape, Workload, workload_of
from retrain.capacity.plan import MEMORY_PARTS, MemoryPlan, largest_batch
from retrain.capacity.roofline import CARDS, ROOFLINE_SHARE, Card, cards_with_memory, detect_card, find_card, step_time
from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.estimate import (
    MEMORY_LABELS,
    list_runs,
    logged_steps,
    measured_step_time,
    memory_plan,
    runs_at_once,
    steps_per_run,
)
from retrain.cli.train import read_config
from retrain.config import TrainConfig
from retrain.config.flags import click_options
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_facts
from retrain.runtime.devices import is_on_cpu
from retrain.runtime.text import format_bytes, format_duration, plural

_POSITIVE = click.FloatRange(min=0, min_open=True)
_PRICE = click.FloatRange(min=0)


@dataclass(frozen=True)
class Given:
    """The GPU, prompt length and prices from the command line; None is looked up."""

    card: str | None
    memory: float | None
    tflops: float | None
    bandwidth: float | None
    prompt_tokens: int
    prices: Prices | None = None


class Model(TypedDict):
    """The model and its size; None where unknown."""

    name: str
    parameters: int | None
    parameters_from: str


class Step(TypedDict):
    """One step: its size, and its time as measured or by roofline."""

    completions: int
    tokens: int
    seconds: float | None
    seconds_from: str | None
    roofline_sample_seconds: float | None
    roofline_train_seconds: float | None
    seconds_by_card: dict[str, float]
    """If only the GPU's memory is known: by roofline, on GPUs with as much."""


class Run(TypedDict):
    """One run."""

    steps: int
    seconds: float | None


class Campaign(TypedDict):
    """All runs of a campaign."""

    conditions: int
    seeds: int
    runs: int
    workers: int
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
    campaign_price: float | None


class Plan(TypedDict):
    """What `retrain plan --json` prints; None where a part is unknown or does not apply."""

    file: str
    backend: str
    devices: str
    model: Model
    card: dict[str, str | float] | None
    memory: dict[str, int | bool | None] | None
    sampling: dict[str, str | int | bool | None] | None
    training: dict[str, int] | None
    largest_batch_size: int | None
    step: Step
    run: Run
    campaign: Campaign | None
    cost: Cost | None


@click.command("plan", short_help="Show what a run needs.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--card", default=None, help="GPU model, e.g. H100; by default the first GPU of this machine.")
@click.option("--memory", type=_POSITIVE, default=None, help="GPU memory in GB.")
@click.option("--tflops", type=_POSITIVE, default=None, help="Peak bf16 TFLOP/s of the GPU.")
@click.option("--bandwidth", type=_POSITIVE, default=None, help="Memory bandwidth of the GPU in GB/s.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=PROMPT_TOKENS,
    show_default=True,
    help="Assumed prompt length in tokens.",
)
@click.option("--prefill-price", type=_PRICE, default=None, help="Price per million prompt tokens.")
@click.option("--sample-price", type=_PRICE, default=None, help="Price per million sampled tokens.")
@click.option("--train-price", type=_PRICE, default=None, help="Price per million trained tokens.")
def command(
    config: str | None,
    as_json: bool,
    card: str | None,
    memory: float | None,
    tflops: float | None,
    bandwidth: float | None,
    prompt_tokens: int,
    prefill_price: float | None,
    sample_price: float | None,
    train_price: float | None,
    **parameters: object,
) -> None:
    """Show the memory, time and cost of CONFIG (default: ./retrain.toml).

    All flags of training are accepted as well: see `retrain help`. Prices need all of --prefill-price, --sample-price
    and --train-price.

    \b
    The JSON has these keys, null where unknown:
      file, backend, devices
      model               name, parameters, parameters_from
      card                the GPU: name, tflops, bandwidth, memory
      memory              in bytes: weights, sampling_copy, adapter, kv_cache,
                          activations, logits, sampling_peak, training_peak,
                          total (the larger peak); fits
      sampling            merging (copies, in-place or never), completions_at_once,
                          frees_cache
      training            micro_batch_tokens, recomputed_layers, prompt_tokens
      largest_batch_size  the largest batch_size that fits
      step                completions, tokens, seconds, seconds_from,
                          roofline_sample_seconds, roofline_train_seconds,
                          seconds_by_card (if only --memory is given)
      run                 steps, seconds
      campaign            conditions, seeds, runs, workers, total_steps, seconds
      cost                of a service that bills by token: prefill_tokens,
                          sample_tokens, train_tokens and price per step,
                          tokens_from, run_price, campaign_price
    """
    prices = _read_prices(prefill_price, sample_price, train_price)
    path, loaded = read_config(config, parameters, as_json)
    data = plan(loaded, str(path), Given(card, memory, tflops, bandwidth, prompt_tokens, prices))
    if as_json:
        print_json(data)
    else:
        _print(data)


command.params.extend(click_options(listed=()))


def plan(config: TrainConfig, file: str, given: Given) -> Plan:
    """Everything that `retrain plan` prints."""
    if config.kind == "squeeze":
        raise ConfigError(f"{file} is a LoRA rank analysis; there is no training in it to plan.")
    facts = read_facts(find_model(config.model.model))
    is_local = config.backend.backend == "local"
    # A service's GPUs are unknown, and those of this machine are not them.
    card = choose_card(config, given) if is_local or given.card or given.tflops else None
    work = workload_of(config, given.prompt_tokens)
    available = int(card.memory * 1e9) if card is not None and card.memory else None
    memory = memory_plan(facts, work, available) if is_local else None
    # Times measured here do not hold for another GPU.
    is_named = any((given.card, given.tflops, given.bandwidth))
    step = _step((None, "") if is_named else measured_step_time(config), facts.shape, work, card, memory)
    steps = steps_per_run(config)
    return {
        "file": file,
        "backend": config.backend.backend,
        "devices": config.backend.devices,
        "model": {
            "name": config.model.model,
            "parameters": facts.parameters,
            "parameters_from": facts.parameters_from,
        },
        "card": asdict(card) if card is not None else None,
        "memory": _memory(memory, available),
        "sampling": _sampling(memory, work),
        "training": _training(memory, work),
        "largest_batch_size": largest_batch(facts.shape, work, available, facts.parameters)
        if facts.shape is not None and is_local and available
        else None,
        "step": step,
        "run": {"steps": steps, "seconds": _times(step["seconds"], steps)},
        "campaign": _campaign(config, file, step["seconds"]),
        "cost": _cost(config, file, work, given.prices),
    }


def _read_prices(prefill: float | None, sample: float | None, train: float | None) -> Prices | None:
    if prefill is not None and sample is not None and train is not None:
        return Prices(prefill, sample, train)
    named = {"--prefill-price": prefill, "--sample-price": sample, "--train-price": train}
    missing = [name for name, price in named.items() if price is None]
    if len(missing) < len(named):
        raise ConfigError(f"a cost needs all three prices; missing: {', '.join(missing)}.  Try: 0 for what is free")
    return None


def _cost(config: TrainConfig, file: str, work: Workload, prices: Prices | None) -> Cost | None:
    """Tokens as a service bills them, and their price where prices were given; None for a local run without prices."""
    if config.backend.backend == "local" and prices is None:
        return None
    logged, where = logged_steps(config)
    measured = logged_tokens(logged, work)
    step = measured or max_tokens_per_step(work)
    steps = steps_per_run(config)
    run = step.times(steps) + evaluation_tokens(config, work, step, steps)
    runs = len(list_runs(config, file)) if config.campaign is not None else 1
    source = f"the mean of {plural(len(logged), 'step')} in {where}" if measured else "every completion at max_tokens"
    return {
        "prefill_tokens": round(step.prefill),
        "sample_tokens": round(step.sample),
        "train_tokens": round(step.train),
        "tokens_from": source,
        "price": step.cost(prices) if prices is not None else None,
        "run_price": run.cost(prices) if prices is not None else None,
        "campaign_price": run.cost(prices) * runs if prices is not None and config.campaign is not None else None,
    }


def choose_card(config: TrainConfig, given: Given) -> Card | None:
    """The GPU that was named, else the one of this machine, with the given numbers in place of its own."""
    card = None if is_on_cpu(config.backend.devices) else detect_card()
    if given.card is not None:
        card = find_card(given.card)
        if card is None:
            known = ", ".join(one.name for one in CARDS)
            raise ConfigError(
                f"--card {given.card!r} is not in the table ({known}).  Try: --memory, --tflops, --bandwidth"
            )
    if (given.memory, given.tflops, given.bandwidth) == (None, None, None):
        return card
    base = card or Card("a custom GPU", 0.0, 0.0, 0.0)
    return Card(base.name, given.tflops or base.tflops, given.bandwidth or base.bandwidth, given.memory or base.memory)


def _memory(plan: MemoryPlan | None, available: int | None) -> dict[str, int | bool | None] | None:
    if plan is None:
        return None
    return {
        **{part: vars(plan)[part] for part in MEMORY_PARTS},
        "sampling_peak": plan.sampling_peak,
        "training_peak": plan.training_peak,
        "total": plan.total,
        "fits": plan.fits if available else None,
    }


def _sampling(plan: MemoryPlan | None, work: Workload) -> dict[str, str | int | bool | None] | None:
    if plan is None or not work.samples_here:
        return None
    return {
        "merging": plan.sampling.merging,
        "completions_at_once": plan.sampling.at_once,
        "frees_cache": plan.frees_cache,
    }


def _training(plan: MemoryPlan | None, work: Workload) -> dict[str, int] | None:
    if plan is None:
        return None
    cut = plan.training
    return {
        "micro_batch_tokens": cut.micro_batch_tokens,
        "recomputed_layers": cut.recomputed_layers,
        "prompt_tokens": work.prompt_tokens,
    }


def _step(
    measured: tuple[float | None, str],
    shape: Shape | None,
    work: Workload,
    card: Card | None,
    memory: MemoryPlan | None,
) -> Step:
    seconds, source = measured
    step: Step = {
        "completions": work.completions,
        "tokens": work.completions * work.max_tokens,
        "seconds": seconds,
        "seconds_from": source if seconds is not None else None,
        "roofline_sample_seconds": None,
        "roofline_train_seconds": None,
        "seconds_by_card": {},
    }
    if shape is None or card is None:
        return step
    recomputed, sampling = (memory.training.recomputed_layers, memory.sampling) if memory is not None else (0, None)
    if not card.tflops and not card.bandwidth and seconds is None:
        known = {one.name: step_time(shape, work, one, recomputed, sampling) for one in cards_with_memory(card.memory)}
        step["seconds_by_card"] = {name: time.likely for name, time in known.items()}
    if card.tflops and card.bandwidth:
        at_best = step_time(shape, work, card, recomputed, sampling)
        step["roofline_sample_seconds"], step["roofline_train_seconds"] = at_best.sample, at_best.train
        if seconds is None:
            step["seconds"] = at_best.likely
            step["seconds_from"] = f"the roofline of {card.name}, assuming {ROOFLINE_SHARE:.0%} of it is reached"
    return step


def _campaign(config: TrainConfig, file: str, step_seconds: float | None) -> Campaign | None:
    if config.campaign is None:
        return None
    runs = len(list_runs(config, file))
    total, workers = runs * config.campaign.max_steps, runs_at_once(config, runs)
    return {
        "conditions": len(config.campaign.conditions),
        "seeds": len(config.campaign.seeds),
        "runs": runs,
        "workers": workers,
        "total_steps": total,
        "seconds": _times(step_seconds, total / workers),
    }


def _times(seconds: float | None, count: float) -> float | None:
    return None if seconds is None else seconds * count


def why_unknown(model: Model) -> str:
    """Why there is no memory plan for a model, and what would help."""
    if model["parameters_from"] == "its files":
        return "only dense decoders are planned, not mixtures of experts"
    if find_model(model["name"]).found == "missing":
        return f"there is no folder {model['name']}"
    return f"the model's config.json is not on this machine.  Try: hf download {model['name']} config.json"


def _print(data: Plan) -> None:
    card, backend, memory, training = data["card"], data["backend"], data["memory"], data["training"]
    device = "the CPU" if is_on_cpu(data["devices"]) else "an unknown GPU (try --card H100)"
    if card and card["memory"]:
        device = f"{card['name']}, {card['memory']:.0f} GB"
    click.echo(f"{data['file']}: {data['model']['name']} on {device if backend == 'local' else backend}")
    print_heading("Peak memory")
    if backend != "local":
        click.echo(f"  managed by {backend}")
    elif memory is None or training is None:
        click.echo(f"  unknown: {why_unknown(data['model'])}")
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
        lines.append("the KV cache is freed before training")
    return lines


def _time_rows(data: Plan) -> list[tuple[str, str]]:
    step, run, campaign = data["step"], data["run"], data["campaign"]
    size = f"{plural(step['completions'], 'completion')}, at most {step['tokens']:,} tokens sampled"
    rows = [("per step", size)]
    if step["seconds"] is None or run["seconds"] is None:
        reason = "the model's shape is unknown" if data["memory"] is None else "the GPU is unknown.  Try: --card"
        if is_on_cpu(data["devices"]):
            reason = "CPUs differ too much to estimate one.  Try: a run of 5 steps"
        if data["backend"] != "local":
            reason = f"the hardware of {data['backend']} is unknown.  Try: a run of 5 steps"
        unknown = f"unknown: no step has been measured, and {reason}"
        by_card = ", ".join(f"{seconds:.0f} on {name}" for name, seconds in step["seconds_by_card"].items())
        rows.append(("seconds per step", f"{by_card}; by roofline, at {ROOFLINE_SHARE:.0%}" if by_card else unknown))
    else:
        rows.append(("seconds per step", f"{step['seconds']:.2f}, from {step['seconds_from']}"))
        rows.append(("per run", f"{plural(run['steps'], 'step')}, {format_duration(run['seconds'])} after start-up"))
    if campaign is not None:
        wall = f", {format_duration(campaign['seconds'])} without start-up" if campaign["seconds"] is not None else ""
        matrix = (plural(campaign["conditions"], "condition"), plural(campaign["seeds"], "seed"))
        product = " × ".join((*matrix, plural(run["steps"], "step")))
        total = f"{product} = {plural(campaign['total_steps'], 'step')}, {plural(campaign['workers'], 'run')} at a time"
        rows.append(("per campaign", f"{total}{wall}"))
    return rows


def _cost_rows(cost: Cost) -> list[tuple[str, str]]:
    tokens = f"{cost['prefill_tokens']:,} prompt, {cost['sample_tokens']:,} sampled, {cost['train_tokens']:,} trained"
    rows = [("tokens per step", f"{tokens}; {cost['tokens_from']}")]
    if cost["price"] is None or cost["run_price"] is None:
        rows.append(("price", "unknown: --prefill-price, --sample-price and --train-price were not given"))
    else:
        rows.append(("per step", f"{cost['price']:.4f}"))
        rows.append(("per run", f"{cost['run_price']:.2f}, evaluations included"))
    if cost["campaign_price"] is not None:
        rows.append(("per campaign", f"{cost['campaign_price']:.2f}"))
    return rows
