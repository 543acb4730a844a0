"""Options that are set and not used, because another option leaves them without effect: each is a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from retrain.config.options import all_options, options_by_path
from retrain.config.rules import SERVER_ENGINES, held_out_source, samples_apart, values_of
from retrain.config.schema import RewardTerm, TrainConfig
from retrain.config.toml import show_value
from retrain.plugins import is_plugin
from retrain.schedules.learning_rate import unused_schedule_args

# Rewards that take the answer from its box.
_BOXED = ("match", "math")

Why = Callable[[TrainConfig], str]
"""Why an option is not used under a configuration; "" where it is."""


@dataclass(frozen=True)
class Note:
    """An option that is set and not used: where it stands, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where} is not used: {self.reason}"


def _while(path: str, is_used: Callable[[Any], bool]) -> Why:
    """Used while the option at `path` has such a value; the reason names the value that it has instead.

    A name that is not built in is a plug-in's, and a plug-in is given whole tables: it may read any option of them.
    """
    section, _, key = path.partition(".")

    def why(config: TrainConfig) -> str:
        value = getattr(getattr(config, section), key)
        return "" if is_used(value) else f"[{section}] {key} is {_show(value)}"

    return why


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value or "empty"
    return show_value(value)


def _either(*reasons: Why) -> Why:
    """The first reason that applies."""
    return lambda config: next(filter(None, (why(config) for why in reasons)), "")


def _table(section: str, switch: str, why: Why) -> dict[str, Why]:
    """The same reason for every option of a table but its switch."""
    return {option.path: why for option in all_options() if option.section == section and option.key != switch}


def _sources(*ignorant: str) -> Why:
    """Not used where every data source that reads the [data] table is one of these."""

    def why(config: TrainConfig) -> str:
        sources = {config.data.source, held_out_source(config)} if config.eval.every else {config.data.source}
        return "" if sources - set(ignorant) else f"[data] source is {config.data.source}"

    return why


def _why_no_held_out_path(config: TrainConfig) -> str:
    if config.environment.provider:
        return "an environment brings its own held-out problems"
    source, section = held_out_source(config), "eval" if config.eval.source else "data"
    reads_one = source == "jsonl" or is_plugin("data", source)
    return "" if reads_one else f"[{section}] source is {source}, which reads no file"


def _why_no_custom_reward(config: TrainConfig) -> str:
    return "[reward] terms replace it" if config.reward.terms else _while("reward.type", "custom".__eq__)(config)


def _why_no_judge(config: TrainConfig) -> str:
    terms = config.reward.terms
    if terms:
        return "" if any(term.type == "judge" for term in terms) else "none of [reward] terms is a judge"
    return _while("reward.type", "judge".__eq__)(config)


def _why_no_box(config: TrainConfig) -> str:
    terms = config.reward.terms
    if terms:
        return "" if any(term.type in _BOXED for term in terms) else "none of [reward] terms looks for a box"
    return _while("reward.type", lambda value: value in _BOXED)(config)


def _why_nothing_frozen(config: TrainConfig) -> str:
    teaching = config.teaching
    student = teaching.student_model or (teaching.enabled and not config.model.lora_rank)
    return "" if config.kl.beta or student else "there is no reference ([kl] beta) and no student of its own"


def _why_no_launch(config: TrainConfig) -> str:
    inference = config.inference
    if inference.engine != "vllm":
        return f"[inference] engine is {inference.engine}, and it is vLLM that can be started"
    return "[inference] url names a server" if inference.url else ""


def _why_server_decides(key: str) -> Why:
    """What whoever starts the server sets, by these flags."""
    flags = {
        ("vllm", "attention_kernel"): "--attention-backend",
        ("vllm", "dtype"): "--dtype and --quantization",
        ("vllm", "kv_cache_dtype"): "--kv-cache-dtype",
        ("vllm", "prefix_caching"): "--no-enable-prefix-caching",
        ("sglang", "attention_kernel"): "--attention-backend",
        ("sglang", "dtype"): "--dtype and --quantization",
        ("sglang", "kv_cache_dtype"): "--kv-cache-dtype",
        ("sglang", "prefix_caching"): "--disable-radix-cache",
        ("mlx", "dtype"): "a model from mlx_lm.convert --dtype",
        ("mlx", "kv_cache_dtype"): "--kv-bits",
        ("max", "dtype"): "--quantization-encoding",
        ("max", "prefix_caching"): "--no-enable-prefix-caching",
    }

    def why(config: TrainConfig) -> str:
        engine = config.inference.engine
        if engine not in SERVER_ENGINES:
            return ""
        if key == "dtype" and config.inference.starts_server:
            return "the server that is started takes launch_dtype"
        flag = flags.get((engine, key))
        return f"[inference] engine is {engine}" + (f"; start its server with {flag}" if flag else "")

    return why


def _why_no_service(config: TrainConfig) -> str:
    remote = config.squeeze is not None and config.squeeze.adapter_path.startswith("tinker://")
    return "" if remote else _TINKER(config)


_TINKER = _while("backend.backend", lambda name: name != "local")
_NOT_TINKER = _while("backend.backend", lambda name: name != "tinker")
_ADAPTER = _while("model.lora_rank", bool)
_SEMANTIC = _while("planning.detector", lambda name: name != "regex")
_MOVING_REFERENCE = _either(_while("kl.beta", bool), _while("kl.sync_ref_model", bool))
_ROWS = _sources("math", "gsm8k", "arithmetic")
_SERVER = _while("inference.engine", lambda name: name != "pytorch")
_LAUNCH = _either(_why_no_launch, _while("inference.launch", bool))
_ZERO_3 = _while("distributed.zero_stage", lambda stage: stage == 3)
_HERE = _while("backend.backend", lambda name: name == "local")

# What is not here although it can be without effect, and why nothing is said of it:
#   [gtpo] [hicra] [sepa], [loss] clip_low and clip_high, [algorithm] uncertainty_kind, [planning] detector: settings
#     of a method. One compares methods by flipping one switch, in the file or by a flag, and the rest stays as it is.
#   [eval] while every = 0, [logging] wandb_* without a project, [campaign] max_workers and stagger_seconds without
#     parallel: kept for the next time it is switched on; that it is off is plain from the switch beside them.
#   [data] and [reward] under an environment, [reward] type under terms, [algorithm] advantage_mode and transform_mode
#     under algorithm_mode: these are the choice that is replaced, and the description of what replaces them says so.
#   [training], [model] and so on in a squeeze file: the file of the run with one table added.
_REASONS: dict[str, Why] = {
    "backend.max_concurrent": _TINKER,
    "backend.throttle_dir": _TINKER,
    "model.base_url": _why_no_service,
    "lora.alpha": _ADAPTER,
    "lora.dropout": _ADAPTER,
    "lora.target_modules": _ADAPTER,
    "training.async_steps": lambda c: "" if samples_apart(c) else "the trainer samples by itself, on its own device",
    "memory.offload_untrained_models": _why_nothing_frozen,
    # 0 says that there is no cap, which is true of cispo.
    "loss.ratio_cap": lambda c: "" if not c.loss.ratio_cap else _while("loss.type", lambda n: n != "cispo")(c),
    "kl.sync_ref_model": _while("kl.beta", bool),
    "kl.ref_model_mixup_alpha": _MOVING_REFERENCE,
    "kl.ref_model_sync_steps": _MOVING_REFERENCE,
    "algorithm.advantage_params": _while("algorithm.advantage_mode", lambda name: is_plugin("advantage", name)),
    "algorithm.transform_params": lambda c: (
        "" if c.algorithm.algorithm_mode else _while("algorithm.transform_mode", lambda n: is_plugin("transform", n))(c)
    ),
    "inference.url": _SERVER,
    "inference.adapter_dir": _SERVER,
    "inference.timeout_s": _SERVER,
    "inference.wait_s": _SERVER,
    "inference.attention_kernel": _why_server_decides("attention_kernel"),
    "inference.dtype": _why_server_decides("dtype"),
    "inference.kv_cache_dtype": _why_server_decides("kv_cache_dtype"),
    "inference.prefix_caching": _why_server_decides("prefix_caching"),
    "inference.launch": _why_no_launch,
    "inference.launch_device": _LAUNCH,
    "inference.gpu_memory_utilization": _LAUNCH,
    "inference.launch_dtype": _LAUNCH,
    "inference.max_model_len": _LAUNCH,
    "planning.model": _SEMANTIC,
    "planning.threshold": _SEMANTIC,
    "logging.strategic_grams": _while("planning.detector", lambda name: name != "semantic"),
    "data.path": _while("data.source", lambda name: name == "jsonl" or is_plugin("data", name)),
    "data.id": _while("data.source", lambda name: name == "hub" or is_plugin("data", name)),
    "data.subset": _sources("arithmetic", "jsonl"),
    "data.remove_unused_columns": _sources("arithmetic", "gsm8k"),
    "data.split": _while("data.source", lambda name: name != "jsonl"),
    "data.prompt_field": _ROWS,
    "data.answer_field": _ROWS,
    "eval.source": lambda c: "an environment brings its own held-out problems" if c.environment.provider else "",
    "eval.path": _why_no_held_out_path,
    "eval.split": lambda c: "a jsonl file has no splits" if c.eval.every and held_out_source(c) == "jsonl" else "",
    **_table("environment", "provider", _while("environment.provider", bool)),
    "reward.custom_module": _why_no_custom_reward,
    "reward.custom_function": _why_no_custom_reward,
    "reward.think_boxes": _why_no_box,
    **{option.path: _why_no_judge for option in all_options() if option.path.startswith("reward.judge_")},
    **_table("teaching", "enabled", _while("teaching.enabled", bool)),
    "distributed.zero_stage": _HERE,
    "distributed.fsdp": _HERE,
    "distributed.offload_optimizer": _while("distributed.zero_stage", bool),
    "distributed.offload_parameters": _ZERO_3,
    "distributed.gather_for_generation": lambda c: "" if c.distributed.fsdp else _ZERO_3(c),
    **_table("backpressure", "enabled", _while("backpressure.enabled", bool)),
}
# What a run on Tinker decides by itself.
_LOCAL = ("inference.", "backend.devices", "backend.adapter_path", "model.dtype", "memory.")
UNUSED: dict[str, Why] = _REASONS | {
    option.path: _either(_NOT_TINKER, _REASONS.get(option.path, lambda config: ""))
    for option in all_options()
    if option.path.startswith(_LOCAL)
}
_SQUEEZE: dict[str, Why] = {
    **_table("squeeze", "adapter_path", _while("squeeze.adapter_path", bool)),
    "squeeze.compress_to": _either(_while("squeeze.adapter_path", bool), _while("squeeze.output_path", bool)),
}
# A campaign gives these to each of its runs.
_CAMPAIGN: dict[str, Why] = {
    "training.seed": lambda c: "a campaign runs each of [campaign] seeds",
    "training.max_steps": _while("campaign.max_steps", lambda steps: False),
    "training.epochs": _while("campaign.max_steps", lambda steps: False),
    "backend.adapter_path": lambda c: "every run of a campaign has an adapter folder of its own",
    "logging.wandb_run_name": lambda c: "a campaign names its runs",
    "logging.wandb_group": lambda c: "a campaign groups its runs by condition",
    "squeeze.adapter_path": lambda c: "a campaign analyses the adapter of its first run",
    "squeeze.compress_to": _while("squeeze.output_path", bool),
    "campaign.gpus_per_run": _while("campaign.executor", "ray".__eq__),
}


def unused_options(config: TrainConfig) -> Iterator[Note]:
    """What is set and not used by a run, or of a campaign by none of its runs whatever the conditions are."""
    values, options = values_of(config), options_by_path()
    for path, why in (UNUSED | _SQUEEZE if config.campaign is None else _CAMPAIGN).items():
        if path in values and values[path] != options[path].default:
            reason = why(config)
            if reason:
                yield Note(options[path].where, reason)
    if config.campaign is None:
        yield from _unused_keys(config)


def _unused_keys(config: TrainConfig) -> Iterator[Note]:
    """Those inside options that are tables."""
    for name in unused_schedule_args(config.optimizer):
        yield Note(f"[optimizer] schedule_args.{name}", f"[optimizer] schedule is {config.optimizer.schedule}")
    function = RewardTerm.model_fields["custom_function"].default
    for index, term in enumerate(config.reward.terms):
        if term.type != "custom":
            for key, is_set in (("module", term.custom_module != ""), ("function", term.custom_function != function)):
                if is_set:
                    yield Note(f"[reward] terms[{index}].custom_{key}", f"its type is {term.type}")
