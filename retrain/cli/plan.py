"""`retrain plan`: memory by part, the largest batch that fits a card, and how long it will take. Loads no model."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from retrain.capacity.cost import Prices, evaluation_tokens, logged_tokens, most_tokens
from retrain.capacity.memory import (
    MEMORY_PARTS,
    PROMPT_TOKENS,
    SPARE,
    MemoryPlan,
    Shape,
    Workload,
    largest_batch,
    plan_memory,
    workload_of,
)
from retrain.capacity.roofline import CARDS, REACHED, Card, detect_card, find_card, step_time
from retrain.cli.console import print_heading, print_json, print_table
from retrain.cli.explain import list_runs, logged_steps, measured_steps, runs_at_once, steps_of
from retrain.cli.train import find_config, load_environment, show_notes
from retrain.config import TrainConfig, load_config
from retrain.config.flags import click_options, overrides_from
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_facts
from retrain.runtime.devices import is_on_cpu

_PARTS = {
    "weights": "weights",
    "sampling_copy": "adapted matrices, folded for sampling",
    "adapter": "adapter, gradient, float32 masters, moments",
    "kv_cache": "KV cache, every completion at full length",
    "activations": "activations of a micro-batch",
    "logits": "logits of a slice",
}


_BILLED = {"prefill": "of prompts", "sample": "sampled", "train": "trained on"}
_PRICE = click.FloatRange(min=0)


@dataclass(frozen=True)
class Given:
    """What the command line says of the card and of prompts; None is looked up."""

    card: str | None
    memory: float | None
    tflops: float | None
    bandwidth: float | None
    prompt_tokens: int
    prices: Prices | None = None


@click.command("plan", short_help="Say what a run needs.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--card", default=None, help="A card by name, e.g. H100; the default is the first GPU here.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), default=None, help="The card's memory in GB.")
@click.option(
    "--tflops", type=click.FloatRange(min=0, min_open=True), default=None, help="Its bf16 products, in TFLOP/s."
)
@click.option(
    "--bandwidth", type=click.FloatRange(min=0, min_open=True), default=None, help="Its memory traffic, in GB/s."
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=PROMPT_TOKENS, help="Tokens of a long prompt.")
@click.option("--prefill-price", type=_PRICE, default=None, help="What a service takes for a million prompt tokens.")
@click.option("--sample-price", type=_PRICE, default=None, help="What it takes for a million sampled tokens.")
@click.option("--train-price", type=_PRICE, default=None, help="What it takes for a million tokens trained on.")
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
    **parameters: Any,
) -> None:
    """Say what CONFIG (./retrain.toml when it is left out) needs, with any flags that training takes.

    The JSON has these keys, null where nothing can be known: file, backend, model (name, parameters,
    parameters_from), card (name, tflops, bandwidth, memory), memory (weights, sampling_copy, adapter, kv_cache,
    activations, logits, total, fits; bytes), training (micro_batch_tokens, recomputed_layers), largest_batch_size,
    step (completions, tokens, seconds, seconds_from, roofline_sample_seconds, roofline_train_seconds), run (steps,
    seconds), campaign (conditions, seeds, runs, workers, total_steps, seconds), cost (of a service that bills
    tokens: prefill_tokens, sample_tokens, train_tokens and price of a step, tokens_from, run_price, campaign_price;
    prices take all three of --prefill-price, --sample-price and --train-price).
    """
    load_environment(announce=not as_json)
    overrides = overrides_from(parameters)
    path = find_config(config, overrides)
    prices = _read_prices(prefill_price, sample_price, train_price)
    given = Given(card, memory, tflops, bandwidth, prompt_tokens, prices)
    loaded = load_config(path, overrides)
    show_notes(loaded)
    data = plan(loaded, str(path), given)
    if as_json:
        print_json(data)
    else:
        _print(data)


command.params.extend(click_options())


def plan(config: TrainConfig, file: str, given: Given) -> dict[str, Any]:
    """All that `retrain plan` knows, as the JSON shows it."""
    if config.kind == "squeeze":
        raise ConfigError(f"{file} is a LoRA rank analysis; there is no training in it to plan.")
    files = find_model(config.model.model)
    facts = read_facts(files)
    here = config.backend.backend == "local"
    # Which card a service computes on nobody knows, so one that is here says nothing of it.
    card = choose_card(config, given) if here or given.card or given.tflops else None
    work = workload_of(config, given.prompt_tokens)
    bytes_there = int(card.memory * 1e9) if card is not None and card.memory else None
    memory = plan_memory(facts.shape, work, bytes_there) if facts.shape is not None and here else None
    if memory is not None and facts.parameters is not None:
        memory = replace(memory, weights=facts.parameters * work.width)
    # What was measured here says nothing of a card that is named.
    named = any((given.card, given.tflops, given.bandwidth))
    step = _step(([], "") if named else measured_steps(config), facts.shape, work, card, memory)
    return {
        "file": file,
        "backend": config.backend.backend,
        "model": {
            "name": config.model.model,
            "parameters": facts.parameters,
            "parameters_from": facts.parameters_from,
        },
        "card": asdict(card) if card is not None else None,
        "memory": _memory(memory, bytes_there),
        "training": {
            "micro_batch_tokens": memory.training.micro_batch_tokens,
            "recomputed_layers": memory.training.recomputed_layers,
        }
        if memory is not None
        else None,
        "largest_batch_size": largest_batch(facts.shape, work, bytes_there)
        if facts.shape is not None and here and bytes_there
        else None,
        "step": step,
        "run": {"steps": steps_of(config), "seconds": _times(step["seconds"], steps_of(config))},
        "campaign": _campaign(config, file, step["seconds"]),
        "cost": _cost(config, file, work, given.prices),
    }


def _read_prices(prefill: float | None, sample: float | None, train: float | None) -> Prices | None:
    named = {"--prefill-price": prefill, "--sample-price": sample, "--train-price": train}
    missing = [name for name, price in named.items() if price is None]
    if prefill is None or sample is None or train is None:
        if len(missing) < len(named):
            raise ConfigError(
                f"a cost takes all three prices, and there is no {' and no '.join(missing)}.  Try: 0 for what is free"
            )
        return None
    return Prices(prefill, sample, train)


def _cost(config: TrainConfig, file: str, work: Workload, prices: Prices | None) -> dict[str, Any] | None:
    """Tokens as a service bills them, and their price where prices were given; nothing for a run on this machine."""
    if config.backend.backend == "local" and prices is None:
        return None
    rows, where = logged_steps(config)
    logged = logged_tokens(rows, work)
    step = logged or most_tokens(work)
    steps = steps_of(config)
    run = step.times(steps) + evaluation_tokens(config, work, step, steps)
    runs = len(list_runs(config, file)) if config.campaign is not None else 1
    return {
        "prefill_tokens": round(step.prefill),
        "sample_tokens": round(step.sample),
        "train_tokens": round(step.train),
        "tokens_from": f"the mean of {len(rows)} steps in {where}" if logged else "every completion at max_tokens",
        "price": step.cost(prices) if prices is not None else None,
        "run_price": run.cost(prices) if prices is not None else None,
        "campaign_price": run.cost(prices) * runs if prices is not None and config.campaign is not None else None,
    }


def choose_card(config: TrainConfig, given: Given) -> Card | None:
    """The card that was named, else the one that is here, with whatever numbers were given put over its own."""
    if given.card is not None:
        card = find_card(given.card)
        if card is None:
            known = ", ".join(one.name for one in CARDS)
            raise ConfigError(
                f"--card {given.card!r} is not in the table ({known}).  Try: --memory, --tflops, --bandwidth"
            )
    else:
        card = None if is_on_cpu(config.backend.devices) else detect_card()
    if (given.memory, given.tflops, given.bandwidth) == (None, None, None):
        return card
    base = card or Card("as given", 0.0, 0.0, 0.0)
    return Card(base.name, given.tflops or base.tflops, given.bandwidth or base.bandwidth, given.memory or base.memory)


def _memory(plan: MemoryPlan | None, there: int | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    parts = {part: getattr(plan, part) for part in MEMORY_PARTS}
    fits = plan.training.fits and plan.total <= there * (1 - SPARE) if there else None
    return {**parts, "total": plan.total, "fits": fits}


def _step(
    measured: tuple[list[float], str],
    shape: Shape | None,
    work: Workload,
    card: Card | None,
    memory: MemoryPlan | None,
) -> dict[str, Any]:
    seconds, where = measured
    known: dict[str, Any] = {
        "completions": work.completions,
        "tokens": work.completions * work.max_tokens,
        "seconds": statistics.median(seconds) if seconds else None,
        "seconds_from": f"the median of {len(seconds)} steps in {where}" if seconds else None,
        "roofline_sample_seconds": None,
        "roofline_train_seconds": None,
    }
    if shape is not None and card is not None and card.tflops and card.bandwidth:
        at_best = step_time(shape, work, card, memory.training.recomputed_layers if memory is not None else 0)
        known |= {"roofline_sample_seconds": at_best.sample, "roofline_train_seconds": at_best.train}
        if not seconds:
            known["seconds"] = at_best.likely
            known["seconds_from"] = f"the roofline of {card.name}, of which {REACHED:.0%} is taken to be reached"
    return known


def _campaign(config: TrainConfig, file: str, step_seconds: float | None) -> dict[str, Any] | None:
    if config.campaign is None:
        return None
    runs = list_runs(config, file)
    total, workers = len(runs) * config.campaign.max_steps, runs_at_once(config, len(runs))
    return {
        "conditions": len(config.campaign.conditions),
        "seeds": len(config.campaign.seeds),
        "runs": len(runs),
        "workers": workers,
        "total_steps": total,
        "seconds": _times(step_seconds, total / workers),
    }


def _times(seconds: float | None, count: float) -> float | None:
    return None if seconds is None else seconds * count


def why_unknown(model: dict[str, Any]) -> str:
    """Why there is no plan for a model, and what would help."""
    if model["parameters_from"] == "its files":
        return "models of this kind, such as mixtures of experts, are not planned"
    if find_model(model["name"]).found == "missing":
        return f"there is no folder {model['name']}"
    return f"its config.json is not on this machine.  Try: hf download {model['name']} config.json"


def _print(data: dict[str, Any]) -> None:
    card, memory, step, run, campaign = (data[key] for key in ("card", "memory", "step", "run", "campaign"))
    named = f"{card['name']}, {card['memory']:.0f} GB" if card and card["memory"] else "no card known; try --card H100"
    here = data["backend"] == "local"
    click.echo(f"{data['file']}: {data['model']['name']} on {named if here else data['backend']}")
    print_heading("Memory at the peak of a step")
    if not here:
        click.echo(f"  that of {data['backend']}")
    elif memory is None:
        click.echo(f"  unknown: {why_unknown(data['model'])}")
    else:
        rows = [(text, _gigabytes(memory[part])) for part, text in _PARTS.items()]
        fits = {None: "", True: "  fits", False: "  DOES NOT FIT"}[memory["fits"]]
        print_table(("part", "memory"), [*rows, ("in all", _gigabytes(memory["total"]) + fits)])
        again = data["training"]["recomputed_layers"] or "none"
        click.echo(f"micro-batches of {data['training']['micro_batch_tokens']:,} tokens; layers recomputed: {again}")
    if data["largest_batch_size"] is not None:
        click.echo(f"largest batch_size sampled in one wave: {data['largest_batch_size']:,}")
    print_heading("Time")
    rows = [("a step", f"{step['completions']:,} completions, at most {step['tokens']:,} tokens sampled")]
    if step["seconds"] is None:
        told = "the model's shape is unknown" if data["memory"] is None else "neither --card nor --tflops is known"
        told = told if here else f"nobody knows the hardware of {data['backend']}.  Try: a run of 5 steps"
        rows.append(("seconds", f"unknown: no step has been measured, and {told}"))
    else:
        rows += [
            ("seconds a step", f"{step['seconds']:.2f}, by {step['seconds_from']}"),
            ("a run", f"{run['steps']:,} steps, {_duration(run['seconds'])}"),
        ]
    if campaign is not None:
        wall = f", {_duration(campaign['seconds'])}" if campaign["seconds"] is not None else ""
        rows.append(
            (
                "the campaign",
                f"{campaign['conditions']} conditions × {campaign['seeds']} seeds × {run['steps']:,} steps = "
                f"{campaign['total_steps']:,} steps, {campaign['workers']} runs at a time{wall}",
            )
        )
    print_table(("what", "value"), rows)
    if data["cost"] is not None:
        _print_cost(data["cost"])


def _print_cost(cost: dict[str, Any]) -> None:
    print_heading("Cost")
    kinds = ", ".join(f"{cost[f'{kind}_tokens']:,} {text}" for kind, text in _BILLED.items())
    rows = [("tokens of a step", f"{kinds}; {cost['tokens_from']}")]
    if cost["price"] is None:
        rows.append(("price", "unknown: --prefill-price, --sample-price and --train-price were not given"))
    else:
        rows += [("a step", f"{cost['price']:.4f}"), ("a run", f"{cost['run_price']:.2f}, evaluations included")]
        if cost["campaign_price"] is not None:
            rows.append(("the campaign", f"{cost['campaign_price']:.2f}"))
    print_table(("what", "value"), rows)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
