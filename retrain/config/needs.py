"""Options that only another option brings to life: a value for one that would be ignored is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from retrain.config.options import all_options, options_by_path
from retrain.config.rules import TABLE, held_out_source, values_of
from retrain.config.schema import TrainConfig
from retrain.config.toml import show_value
from retrain.errors import Problem


@dataclass(frozen=True)
class Need:
    """What an option needs to matter. `text` completes the sentence "it needs …".

    A name that is not built in is a plug-in's, and a plug-in is given whole tables: it may read any option of them.
    """

    text: str
    is_met: Callable[[TrainConfig], bool]


def _switch(section: str, switch: str, need: Need) -> dict[str, Need]:
    """The same need for every option of a table but the switch itself."""
    return {option.path: need for option in all_options() if option.section == section and option.key != switch}


def _sources(config: TrainConfig) -> set[str]:
    """The data sources that read the [data] table."""
    return {config.data.source, held_out_source(config)} if config.eval.every else {config.data.source}


_TINKER = Need('[backend] backend = "tinker"', lambda c: c.backend.backend != "local")
_SERVICE = Need(
    _TINKER.text,
    lambda c: _TINKER.is_met(c) or (c.squeeze is not None and c.squeeze.adapter_path.startswith("tinker://")),
)
_ADAPTER = Need("an adapter: [model] lora_rank above 0", lambda c: c.model.lora_rank > 0)
_SEMANTIC = Need('[planning] detector = "semantic"', lambda c: c.planning.detector != "regex")
_MOVING_REFERENCE = Need("[kl] sync_ref_model = true", lambda c: c.kl.sync_ref_model)
_ROWS = Need('[data] source = "jsonl" or "hub"', lambda c: bool(_sources(c) - {"math", "gsm8k", "arithmetic"}))
_PROVIDER = Need("[environment] provider", lambda c: c.environment.provider != "")
_JUDGE = Need(
    '[reward] type = "judge"', lambda c: "judge" in ([term.type for term in c.reward.terms] or [c.reward.type])
)
_SERVER = Need("an [inference] engine that is a server", lambda c: c.inference.engine != "pytorch")
_LAUNCH = Need("[inference] launch = true", lambda c: c.inference.launch)
_ZERO_3 = Need("[distributed] zero_stage = 3", lambda c: c.distributed.zero_stage == 3)

# What is not here although it can be without effect, and why it stays accepted:
#   [gtpo] [hicra] [sepa], [loss] clip_low and clip_high, [algorithm] uncertainty_kind, [planning] detector: settings
#     of a method. One compares methods by flipping one switch, in the file or by a flag, and the rest stays as it is.
#   [eval] while every = 0, [logging] wandb_* without a project, [campaign] max_workers and stagger_seconds without
#     parallel: kept for the next time it is switched on; that it is off is plain from the switch beside them.
#   [squeeze]: a campaign fills in the rest.
#   [data] and [reward] under an environment, [reward] type under terms, [algorithm] advantage_mode and transform_mode
#     under algorithm_mode: these are the choice that is replaced, and the description of what replaces them says so.
#   [training], [model] and so on in a squeeze file: the file of the run with one table added.
NEEDS: dict[str, Need] = {
    "backend.max_concurrent": _TINKER,
    "backend.throttle_dir": _TINKER,
    "model.base_url": _SERVICE,
    "lora.alpha": _ADAPTER,
    "lora.dropout": _ADAPTER,
    "lora.target_modules": _ADAPTER,
    "memory.offload_untrained_models": Need(
        "a reference ([kl] beta) or a student of its own ([teaching] student_model)",
        lambda c: c.kl.beta > 0 or c.teaching.student_model != "" or (c.teaching.enabled and not c.model.lora_rank),
    ),
    # 0 says that there is no cap, which is true of cispo.
    "loss.ratio_cap": Need('[loss] type other than "cispo"', lambda c: c.loss.type != "cispo" or not c.loss.ratio_cap),
    "kl.ref_model_mixup_alpha": _MOVING_REFERENCE,
    "kl.ref_model_sync_steps": _MOVING_REFERENCE,
    "inference.adapter_dir": _SERVER,
    "inference.timeout_s": _SERVER,
    "inference.wait_s": _SERVER,
    "inference.launch_device": _LAUNCH,
    "inference.gpu_memory_utilization": _LAUNCH,
    "inference.launch_dtype": _LAUNCH,
    "inference.max_model_len": _LAUNCH,
    "planning.model": _SEMANTIC,
    "planning.threshold": _SEMANTIC,
    "logging.strategic_grams": Need('[planning] detector = "regex"', lambda c: c.planning.detector != "semantic"),
    "data.subset": Need(
        '[data] source = "math", "gsm8k" or "hub"', lambda c: bool(_sources(c) - {"arithmetic", "jsonl"})
    ),
    "data.remove_unused_columns": Need(
        '[data] source = "math", "jsonl" or "hub"', lambda c: bool(_sources(c) - {"arithmetic", "gsm8k"})
    ),
    "data.split": Need('[data] source other than "jsonl"', lambda c: c.data.source != "jsonl"),
    "data.prompt_field": _ROWS,
    "data.answer_field": _ROWS,
    "eval.split": Need('[eval] source other than "jsonl"', lambda c: not c.eval.every or held_out_source(c) != "jsonl"),
    **_switch("environment", "provider", _PROVIDER),
    "reward.custom_function": Need(
        '[reward] type = "custom"', lambda c: c.reward.type == "custom" and not c.reward.terms
    ),
    **{option.path: _JUDGE for option in all_options() if option.path.startswith("reward.judge_")},
    **_switch("teaching", "enabled", Need("[teaching] enabled = true", lambda c: c.teaching.enabled)),
    "distributed.offload_optimizer": Need("[distributed] zero_stage = 1 or 3", lambda c: c.distributed.zero_stage != 0),
    "distributed.offload_parameters": _ZERO_3,
    "distributed.gather_for_generation": Need(
        "[distributed] zero_stage = 3 or fsdp = true", lambda c: c.distributed.zero_stage == 3 or c.distributed.fsdp
    ),
    **_switch("backpressure", "enabled", Need("[backpressure] enabled = true", lambda c: c.backpressure.enabled)),
    "campaign.gpus_per_run": Need(
        '[campaign] executor = "ray"', lambda c: c.campaign is None or c.campaign.executor == "ray"
    ),
}


def idle_options(config: TrainConfig) -> dict[str, Any]:
    """Options that are set and would be ignored, with their values. What a campaign gives its runs they judge."""
    values, options = values_of(config), options_by_path()
    return {
        path: values[path]
        for path, need in NEEDS.items()
        if (config.campaign is None or path.startswith("campaign."))
        and path in values
        and values[path] != options[path].default
        and not need.is_met(config)
    }


def find_idle_options(config: TrainConfig, judged: Iterable[Problem] = ()) -> Iterator[Problem]:
    """A problem for each of them, unless one already `judged` leaves its table, or that of its need, in doubt."""
    doubtful = {table for problem in judged for table in TABLE.findall(f"{problem.where} {problem.hint}")}
    for path, value in idle_options(config).items():
        where, need = options_by_path()[path].where, NEEDS[path].text
        if not doubtful.intersection(TABLE.findall(f"{where} {need}")):
            yield Problem(where, f"= {show_value(value)} has no effect: it needs {need}.")
