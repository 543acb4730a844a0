"""`retrain plan`: the memory that a run needs by part, the largest batch that fits a GPU, wall time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import click

from retrain.campaign.plan import runs_at_once, split_conditions
from retrain.capacity.cost import (
    Prices,
    count_evaluations,
    evaluation_tokens,
    logged_groups,
    logged_prompt_tokens,
    logged_tokens,
    max_tokens_per_step,
)
from retrain.capacity.memory import PROMPT_TOKENS, Shape, Workload, workload_of
from retrain.capacity.plan import MEMORY_PARTS, MemoryPlan, largest_batch
from retrain.capacity.roofline import (
    GPUS,
    ROOFLINE_SHARE,
    Gpu,
    detect_gpu,
    find_gpu,
    gpus_with_memory,
    gpus_with_words,
    step_time,
)
from retrain.cli.console import FiniteRange, print_json
from retrain.cli.estimate import (
    MeasuredTime,
    check_resumed,
    count_held_out,
    find_assumptions,
    find_short_memory,
    list_runs,
    logged_steps,
    max_turns,
    measure_time,
    memory_plan,
    steps_per_run,
)
from retrain.cli.plan_text import Campaign, Cost, Plan, Run, Step, print_plan
from retrain.cli.train import read_config
from retrain.config import TrainConfig
from retrain.config.flags import click_options
from retrain.config.schema import Campaign as CampaignSettings
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_facts
from retrain.runtime.devices import device_names, is_on_cpu
from retrain.runtime.text import plural

_POSITIVE = FiniteRange(min=0, min_open=True)
_PRICE = FiniteRange(min=0)


@dataclass(frozen=True)
class Given:
    """The GPU, prompt length and prices from the command line; None is looked up."""

    gpu: str | None
    memory: float | None
    tflops: float | None
    bandwidth: float | None
    prompt_tokens: int | None
    prices: Prices | None = None

    @property
    def names_gpu(self) -> bool:
        """Whether anything is given about a GPU."""
        return any((self.gpu, self.memory, self.tflops, self.bandwidth))


@click.command("plan", short_help="Show what a run needs.", context_settings={"max_content_width": 110})
@click.argument("config", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--gpu", default=None, help="GPU model, e.g. H100; by default the first GPU of this machine.")
@click.option("--memory", type=_POSITIVE, default=None, help="GPU memory in GB.")
@click.option("--tflops", type=_POSITIVE, default=None, help="Peak bf16 TFLOP/s of the GPU.")
@click.option("--bandwidth", type=_POSITIVE, default=None, help="Memory bandwidth of the GPU in GB/s.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=None,
    help="Prompt length in tokens; by default, the cost estimate uses that of logged steps, and "
    f"{PROMPT_TOKENS} is assumed otherwise.",
)
@click.option("--prefill-price", type=_PRICE, default=None, help="Price per million prompt tokens.")
@click.option("--sample-price", type=_PRICE, default=None, help="Price per million sampled tokens.")
@click.option("--train-price", type=_PRICE, default=None, help="Price per million trained tokens.")
def command(
    config: str | None,
    as_json: bool,
    gpu: str | None,
    memory: float | None,
    tflops: float | None,
    bandwidth: float | None,
    prompt_tokens: int | None,
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
      notes               what is not in the numbers
      model               name, parameters, parameters_from
      gpu                 name, tflops, bandwidth, memory
      memory              in bytes: weights, sampling_copy, adapter, kv_cache,
                          activations, logits, sampling_peak, training_peak,
                          total (the larger peak); fits
      sampling            merging (copies, in-place or never), completions_at_once,
                          frees_cache
      training            micro_batch_tokens, recomputed_layers, prompt_tokens
      largest_batch_size  the largest batch_size sampled at once
      step                completions, turns (maximum per completion), tokens
                          (maximum; of one turn if turns is null), seconds,
                          seconds_from,
                          roofline_sample_seconds, roofline_train_seconds,
                          seconds_by_gpu (if only --memory is given)
      run                 steps, evaluations, evaluation_seconds (of one), seconds
                          (with evaluations, where their time is known)
      campaign            conditions, seeds, runs, workers, take_turns,
                          total_steps, seconds
      cost                for a service that bills by token: prefill_tokens,
                          sample_tokens, train_tokens and price per step,
                          tokens_from, run_price, run_price_includes,
                          campaign_price
    """
    prices = _read_prices(prefill_price, sample_price, train_price)
    path, loaded = read_config(config, parameters, as_json)
    data = plan(loaded, str(path), Given(gpu, memory, tflops, bandwidth, prompt_tokens, prices))
    if as_json:
        print_json(data)
    else:
        print_plan(data)


command.params.extend(click_options(listed=()))


def plan(config: TrainConfig, file: str, given: Given) -> Plan:
    """Everything that `retrain plan` prints."""
    if config.kind == "squeeze":
        raise ConfigError(f"{file} is a LoRA rank analysis; there is no training in it to plan.")
    check_resumed(config, file)
    list_runs(config, file)  # rejects conditions that cannot be run together
    plans = {name: _plan_runs(one, file, given) for name, one in split_conditions(config, file).items()}
    largest = max(plans, key=lambda name: _most(plans[name]))
    data = plans[largest]
    if config.campaign is None:
        return data
    data["notes"] = list(dict.fromkeys(note for one in plans.values() for note in one["notes"]))
    if len({_size(one) for one in plans.values()}) > 1:
        data["notes"].append(
            f"conditions differ in size; memory, steps, runs and their prices are those of {largest}, which needs most"
        )
    data["campaign"] = _campaign(config.campaign, [one["run"] for one in plans.values()])
    if data["cost"] is not None:
        prices = [one["cost"]["run_price"] if one["cost"] is not None else None for one in plans.values()]
        known = [price for price in prices if price is not None]
        data["cost"]["campaign_price"] = sum(known) * len(config.campaign.seeds) if len(known) == len(prices) else None
    return data


def _size(data: Plan) -> tuple[str, tuple[int, int], int, int | None]:
    """What the note on conditions of other sizes is about."""
    return data["model"]["name"], _most(data), data["step"]["completions"], data["run"]["steps"]


def _most(data: Plan) -> tuple[int, int]:
    """What the conditions of a campaign are ordered by: memory, where it is known, then tokens."""
    return int((data["memory"] or {}).get("total") or 0), data["step"]["tokens"]


def _plan_runs(config: TrainConfig, file: str, given: Given) -> Plan:
    """The plan of a run, or of the runs of one condition of a campaign."""
    facts = read_facts(find_model(config.model.model))
    is_local = config.backend.backend == "local"
    if is_local and given.names_gpu:
        config = _on_gpu(config)
    # A service's GPUs are unknown, and they are not those of this machine.
    gpu = choose_gpu(config, given) if is_local or given.gpu or given.tflops else None
    work = workload_of(config, given.prompt_tokens or PROMPT_TOKENS)
    available = int(gpu.memory * 1e9 / _processes(config)) if gpu is not None and gpu.memory else None
    memory = memory_plan(facts, work, available) if is_local else None
    # Times measured here do not hold for another GPU.
    is_named = any((given.gpu, given.tflops, given.bandwidth))
    measured = MeasuredTime(None, None, "") if is_named else measure_time(config)
    step = _step(config, work, measured)
    if facts.shape is not None and gpu is not None:
        _add_roofline(step, facts.shape, work, gpu, memory)
    run = _run(config, replace(measured, step=step["seconds"]))
    return {
        "file": file,
        "backend": config.backend.backend,
        "devices": config.backend.devices,
        "notes": [*find_assumptions(config), *find_short_memory(config, memory.total if memory else None)],
        "model": {
            "name": config.model.model,
            "parameters": facts.parameters,
            "parameters_from": facts.parameters_from,
        },
        "gpu": asdict(gpu) if gpu is not None else None,
        "memory": _memory(memory, available),
        "sampling": _sampling(memory, work),
        "training": _training(memory, work),
        "largest_batch_size": largest_batch(facts.shape, work, available, facts.parameters)
        if facts.shape is not None and is_local and available
        else None,
        "step": step,
        "run": run,
        "campaign": None,
        "cost": _cost(config, run, work, given),
    }


def _processes(config: TrainConfig) -> int:
    """Processes of a campaign that divide the memory of a GPU among them."""
    campaign = config.campaign
    shares = campaign is not None and campaign.parallel and campaign.executor == "local" and not campaign.share_model
    return max(1, campaign.max_workers) if campaign is not None and shares else 1


def _on_gpu(config: TrainConfig) -> TrainConfig:
    """The configuration with GPUs as devices where this machine would use its CPU."""
    if not is_on_cpu(config.backend.devices):
        return config
    devices = ",".join(f"gpu:{at}" for at, _ in enumerate(device_names(config.backend.devices)))
    return config.model_copy(update={"backend": config.backend.model_copy(update={"devices": devices})})


def _read_prices(prefill: float | None, sample: float | None, train: float | None) -> Prices | None:
    if prefill is not None and sample is not None and train is not None:
        return Prices(prefill, sample, train)
    named = {"--prefill-price": prefill, "--sample-price": sample, "--train-price": train}
    missing = [name for name, price in named.items() if price is None]
    if len(missing) < len(named):
        raise ConfigError(f"a cost needs all three prices; missing: {', '.join(missing)}.  Try: 0 for what is free")
    return None


def _cost(config: TrainConfig, run: Run, work: Workload, given: Given) -> Cost | None:
    """Tokens as a service bills them, and their price where prices were given; None for a local run without prices."""
    prices = given.prices
    if config.backend.backend == "local" and prices is None:
        return None
    logged, where = logged_steps(config)
    length = logged_prompt_tokens(logged) if given.prompt_tokens is None else None
    work = replace(work, prompt_tokens=length or work.prompt_tokens)
    measured = logged_tokens(logged, work)
    turns, steps, evaluations = max_turns(config), run["steps"], run["evaluations"]
    step = measured or max_tokens_per_step(work, turns or 1)
    known = count_held_out(config) if evaluations else 0
    problems = config.eval.max_examples if known is None else known
    per_evaluation = f"{'at most ' if known is None else ''}{plural(problems, 'problem')}"
    price = None
    if prices is not None and steps is not None and evaluations is not None:
        completion = step.sample / max(1.0, logged_groups(logged if measured else (), work) * work.group)
        evaluation = evaluation_tokens(config, problems, work.prompt_tokens, completion)
        price = (step.times(steps) + evaluation.times(evaluations)).cost(prices)
    at_most = "every completion at max_tokens" + {1: "", None: ", in a single turn"}.get(turns, f" in {turns} turns")
    source = f"the mean of {plural(len(logged), 'step')} in {where}" if measured else at_most
    source += "" if length else f"; prompts of {work.prompt_tokens} tokens are assumed"
    return {
        "prefill_tokens": round(step.prefill),
        "sample_tokens": round(step.sample),
        "train_tokens": round(step.train),
        "tokens_from": source,
        "price": step.cost(prices) if prices is not None else None,
        "run_price": price,
        "run_price_includes": f"{plural(evaluations, 'evaluation')} of {per_evaluation}" if evaluations else "",
        "campaign_price": None,
    }


def choose_gpu(config: TrainConfig, given: Given) -> Gpu | None:
    """The GPU that was named, else the one of this machine, with the given numbers in place of its own."""
    gpu = None if is_on_cpu(config.backend.devices) else detect_gpu()
    if given.gpu is not None:
        gpu = find_gpu(given.gpu)
        if gpu is None:
            known = ", ".join(one.name for one in GPUS)
            similar = " or ".join(f'--gpu "{one.name}"' for one in gpus_with_words(given.gpu))
            hint = similar or "--memory, --tflops, --bandwidth"
            raise ConfigError(f"--gpu {given.gpu!r} is not in the table ({known}).  Try: {hint}")
    if (given.memory, given.tflops, given.bandwidth) == (None, None, None):
        return gpu
    base = gpu or Gpu("a custom GPU", 0.0, 0.0, 0.0)
    return Gpu(base.name, given.tflops or base.tflops, given.bandwidth or base.bandwidth, given.memory or base.memory)


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


def _step(config: TrainConfig, work: Workload, measured: MeasuredTime) -> Step:
    turns = max_turns(config)
    return {
        "completions": work.completions,
        "turns": turns,
        "tokens": work.completions * work.max_tokens * (turns or 1),
        "seconds": measured.step,
        "seconds_from": measured.source if measured.step is not None else None,
        "roofline_sample_seconds": None,
        "roofline_train_seconds": None,
        "seconds_by_gpu": {},
    }


def _add_roofline(step: Step, shape: Shape, work: Workload, gpu: Gpu, memory: MemoryPlan | None) -> None:
    """The time of a step by roofline, which is also its time if none was measured."""
    seconds = step["seconds"]
    plans = (memory.training, memory.sampling) if memory is not None else ()
    if not gpu.tflops and not gpu.bandwidth and seconds is None:
        known = {one.name: step_time(shape, work, one, *plans) for one in gpus_with_memory(gpu.memory)}
        step["seconds_by_gpu"] = {name: time.likely for name, time in known.items()}
    if gpu.tflops and gpu.bandwidth:
        at_best = step_time(shape, work, gpu, *plans)
        step["roofline_sample_seconds"], step["roofline_train_seconds"] = at_best.sample, at_best.train
        if seconds is None:
            step["seconds"] = at_best.likely
            step["seconds_from"] = f"the roofline of {gpu.name}, assuming {ROOFLINE_SHARE:.0%} of it is reached"


def _run(config: TrainConfig, time: MeasuredTime) -> Run:
    steps = steps_per_run(config)
    return {
        "steps": steps,
        "evaluations": count_evaluations(config, steps) if steps is not None else None,
        "evaluation_seconds": time.evaluation,
        "seconds": time.of_run(config, steps),
    }


def _campaign(settings: CampaignSettings, of_conditions: Sequence[Run]) -> Campaign:
    """All runs of a campaign, from one run of each condition."""
    seeds = len(settings.seeds)
    runs = seeds * len(of_conditions)
    workers = runs_at_once(settings, runs)
    seconds = [run["seconds"] for run in of_conditions if run["seconds"] is not None]
    is_known = len(seconds) == len(of_conditions)
    return {
        "conditions": len(of_conditions),
        "seeds": seeds,
        "runs": runs,
        "workers": workers,
        "take_turns": settings.share_model,
        "total_steps": seeds * sum(run["steps"] or 0 for run in of_conditions),
        "seconds": sum(seconds) * seeds / (1 if settings.share_model else workers) if is_known else None,
    }
