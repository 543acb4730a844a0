"""Arguments of GRPOConfig that do not go together. Each rule is a function that yields the problems it finds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from retrain.errors import ConfigIssue
from retrain.grpo.parameters import defaults

if TYPE_CHECKING:
    from retrain.grpo.config import GRPOConfig

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
}
"""Schedules of transformers by name, and what retrain calls them."""
LOSSES = {"dapo": "ppo", "bnpo": "ppo", "dr_grpo": "dr_grpo", "grpo": "grpo"}
"""Losses of TRL by name, and what retrain calls them."""
OPTIMISERS = ("adamw_torch", "adamw_torch_fused")
TRACKERS = ("wandb", "trackio")
TEMPLATES = {
    "student_diagnostic_template": ("question",),
    "teacher_adaptive_template": ("question", "approach"),
    "student_with_teaching_template": ("question", "teaching"),
    "student_baseline_template": ("question",),
}
_LOCAL = ("vllm_device", "vllm_gpu_memory_utilization", "vllm_dtype", "vllm_max_model_len")
_SERVER = ("vllm_host", "vllm_port", "vllm_server_timeout", "num_vllm_clients")
_TEACHING = ("student_model", "max_probe_tokens", "degradation_penalty_multiplier", "efficiency_weight", *TEMPLATES)


def find_combinations(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Every problem that any rule finds."""
    for rule in (_idle, _batch, _aggregation, _vllm, _reference, _passes, _length, _templates, _names, _loss, _tables):
        yield from rule(config)


def global_batch(config: GRPOConfig) -> int:
    """Completions of one step, over all processes."""
    # Read before transformers has looked at the machine, so not from `world_size`.
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * processes()


def processes() -> int:
    """Processes that a launcher started: torchrun and accelerate both say it so."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _idle(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Arguments that only another one brings to life."""
    usual = defaults(type(config))
    needs = (
        (_LOCAL, "use_vllm=True", config.use_vllm),
        (_SERVER, "use_vllm_server=True", config.use_vllm_server),
        (("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model=True", config.sync_ref_model),
        (_TEACHING, "adaptive_teaching=True", config.adaptive_teaching),
        (("eval_steps",), 'eval_strategy="steps"', name_of(config.eval_strategy) == "steps"),
        (("num_generations_eval",), "an eval_strategy", name_of(config.eval_strategy) != "no"),
        (("run_name",), "report_to", trackers_of(config) != []),
        (("project",), "report_to", trackers_of(config) != []),
        (("log_completions",), "report_to", trackers_of(config) != []),
        (("offload_untrained_models",), "beta or a student_model", config.beta > 0 or config.student_model is not None),
        (("artificial_epochs",), "no max_steps", config.max_steps == -1),
    )
    for names, need, met in needs:
        for name in names:
            value = vars(config)[name]
            if not met and value != usual[name]:
                yield ConfigIssue(name, f"= {value!r} has no effect: it needs {need}.")


def _batch(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Whole groups must make up a step."""
    batch, group = global_batch(config), config.num_generations
    if batch % group:
        arithmetic = (
            f"per_device_train_batch_size {config.per_device_train_batch_size} × gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps} × processes {processes()} = {batch} completions a step"
        )
        fitting = [n for n in range(2, batch + 1) if batch % n == 0]
        near = sorted(sorted(fitting, key=lambda n: (abs(n - group), n))[:3])
        hints = [f"num_generations={' or '.join(map(str, near))}"] if near else []
        unit = config.gradient_accumulation_steps * processes()
        wanted = config.per_device_train_batch_size
        step = group // math.gcd(group, unit)
        sizes = [n for n in (wanted // step * step, (wanted // step + 1) * step) if n]
        hints += [f"per_device_train_batch_size={' or '.join(map(str, sizes))}"]
        yield ConfigIssue("num_generations", f"= {group} does not divide {arithmetic}.", f"Try: {', or '.join(hints)}")
    if config.max_steps == 0:
        yield ConfigIssue("max_steps", "must be -1 or at least 1, got 0.")


def _aggregation(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """A sampling must be of whole groups, and of this step's weights."""
    steps = config.generation_aggregation_steps
    if steps is None:
        return
    if steps > config.gradient_accumulation_steps:
        yield ConfigIssue(
            "generation_aggregation_steps",
            f"= {steps} is more than gradient_accumulation_steps = {config.gradient_accumulation_steps}: it would "
            "sample for a later step from the weights of this one.",
            f"Try: {config.gradient_accumulation_steps}",
        )
    completions = steps * config.per_device_train_batch_size * processes()
    if completions % config.num_generations:
        yield ConfigIssue(
            "generation_aggregation_steps",
            f"= {steps} × per_device_train_batch_size {config.per_device_train_batch_size} × processes {processes()} = "
            f"{completions} completions, which num_generations = {config.num_generations} does not divide.",
        )


def _vllm(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Servers are started here or run already."""
    if config.use_vllm and config.use_vllm_server:
        yield ConfigIssue(
            "use_vllm", "does not go with use_vllm_server: the one starts a server, the other uses one that runs."
        )
    last = (config.vllm_port or 8000) + config.num_vllm_clients - 1
    if config.use_vllm_server and last > 65535:
        yield ConfigIssue(
            "num_vllm_clients", f"= {config.num_vllm_clients} reaches up to port {last}; the last is 65535."
        )
    if not config.ds3_gather_for_generation and not (config.use_vllm or config.use_vllm_server):
        yield ConfigIssue(
            "ds3_gather_for_generation",
            "= False does not go with sampling in this process, which needs whole weights.",
            "Try: use_vllm_server=True with a LoRA adapter",
        )


def _reference(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """A reference that no loss looks at need not move."""
    if config.sync_ref_model and config.beta == 0:
        yield ConfigIssue("sync_ref_model", "has no effect with beta = 0: there is no reference.", "Try: beta=0.04")


def _passes(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Both say how a step is cut."""
    if config.backprop_accumulation_steps is not None and config.backprop_accumulation_micro_batch_size is not None:
        yield ConfigIssue(
            "backprop_accumulation_steps",
            "does not go with backprop_accumulation_micro_batch_size: each says how a step is cut into passes.",
        )
    kwargs = config.gradient_checkpointing_kwargs
    if kwargs is not None and kwargs != {"use_reentrant": False}:
        yield ConfigIssue(
            "gradient_checkpointing_kwargs",
            f"= {kwargs!r} is not how activations are recomputed here.",
            "Try: {'use_reentrant': False}",
        )


def _length(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """A share of all steps is below 1; a number of steps is whole."""
    for name in ("logging_steps", "save_steps", "eval_steps"):
        value = vars(config)[name]
        if value is not None and value > 1 and value != int(value):
            yield ConfigIssue(name, f"must be a whole number, or a share below 1, got {value!r}.")


def _templates(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """A template that leaves out a variable would never show it to the model."""
    for name, variables in TEMPLATES.items():
        text = vars(config)[name]
        missing = [f"{{{variable}}}" for variable in variables if text is not None and f"{{{variable}}}" not in text]
        if missing:
            yield ConfigIssue(name, f"lacks {' and '.join(missing)}.")


def _names(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Names that choose a part must be of a part that there is."""
    schedule, optimiser = name_of(config.lr_scheduler_type), name_of(config.optim)
    if schedule not in SCHEDULES:
        yield ConfigIssue("lr_scheduler_type", f"= {schedule!r} is not in retrain.", f"It has: {', '.join(SCHEDULES)}.")
    if optimiser not in OPTIMISERS:
        yield ConfigIssue("optim", f"= {optimiser!r} is not in retrain.", f"It has: {', '.join(OPTIMISERS)}.")
    for tracker in trackers_of(config):
        if tracker not in TRACKERS:
            yield ConfigIssue("report_to", f"= {tracker!r} is not in retrain.", f"It has: {', '.join(TRACKERS)}, none.")
    for name, known in (("logging_strategy", ""), ("save_strategy", "best"), ("eval_strategy", "")):
        if name_of(vars(config)[name]) not in ("steps", "epoch", "no"):
            text = "needs a measure of the best model." if known else "must be 'steps', 'epoch' or 'no'."
            yield ConfigIssue(name, f"= {name_of(vars(config)[name])!r} {text}")


def _loss(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """A loss of another formula under the same name would mislead."""
    loss = config.loss_type
    if loss not in LOSSES:
        yield ConfigIssue("loss_type", f"= {loss!r} is not in retrain.", f"It has: {', '.join(LOSSES)}.")
    elif loss == "bnpo" and global_batch(config) > config.per_device_train_batch_size:
        yield ConfigIssue(
            "loss_type", "= 'bnpo' averages over each device's batch by itself; here the step is one.", "Try: 'dapo'"
        )
    if config.importance_sampling_level == "sequence" and loss in ("dr_grpo", "grpo"):
        yield ConfigIssue(
            "importance_sampling_level", f"= 'sequence' does not go with loss_type = {loss!r}.", "Try: 'dapo'"
        )


def _tables(config: GRPOConfig) -> Iterator[ConfigIssue]:
    """Arguments that are handed on: those that are set here, and numbers that are none."""
    for name in ("tokenize", "add_generation_prompt"):
        if name in (config.chat_template_kwargs or {}):
            yield ConfigIssue("chat_template_kwargs", f"holds {name}, which is set here already.", "Leave it out.")
    for name, value in (config.lr_scheduler_kwargs or {}).items():
        if not isinstance(value, int | float):
            yield ConfigIssue("lr_scheduler_kwargs", f"holds {name} = {value!r}, which is no number.")


def name_of(choice: object) -> str:
    """An enum's value, or the text that stands for it."""
    return str(choice.value) if isinstance(choice, Enum) else str(choice)


def trackers_of(config: GRPOConfig) -> list[str]:
    """The trackers that report_to names."""
    given = config.report_to
    names = [given] if isinstance(given, str) else list(given or [])
    return [name for name in names if name != "none"]
