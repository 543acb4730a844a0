"""From GRPOConfig to TrainConfig: the run that a script describes, in retrain's own terms."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retrain.config import TrainConfig
from retrain.config.load import build_config
from retrain.errors import ConfigError
from retrain.grpo.combinations import LOSSES, SCHEDULES, global_batch, name_of, processes, trackers_of
from retrain.grpo.config import GRPOConfig

MODEL_FOLDER = "model"
"""Folder inside output_dir that always holds the newest weights."""
ROWS = "retrain.grpo.script:Rows"
"""The data source of a run whose prompts and rewards are in a script."""
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "auto": "auto"}
_ALL = 2**31


@dataclass(frozen=True)
class Setup:
    """What a trainer was given beside its arguments."""

    model: str
    prompts: int
    held_out: int = 0
    terms: Sequence[Mapping[str, Any]] = ()
    """The rewards as `[[reward.terms]]`."""
    lora: Mapping[str, Any] = field(default_factory=lambda: {"model.lora_rank": 0})
    """Options of `[model]` and `[lora]`."""
    dtype: str = ""
    """Precision that the model was loaded in, where it was given loaded."""
    resume: str = ""


def to_train_config(args: GRPOConfig, setup: Setup) -> TrainConfig:
    """The configuration of the run, checked as one from a file would be."""
    if (args.use_vllm or args.use_vllm_server) and not setup.lora["model.lora_rank"]:
        which = "use_vllm" if args.use_vllm else "use_vllm_server"
        raise ConfigError(
            f"{which} needs a peft_config: servers are given adapters; a whole model is sampled from in this process."
        )
    options: dict[str, Any] = {
        **_training(args),
        **_lengths(args, setup),
        **_optimizer(args),
        **_algorithm(args),
        **_model(args, setup),
        **_inference(args),
        **_memory(args),
        **_teaching(args),
        **_logging(args),
        "reward.terms": list(setup.terms),
        "data.source": ROWS,
        "data.remove_unused_columns": args.remove_unused_columns,
        "resume.from": setup.resume,
    }
    return build_config({}, options, source="the run that GRPOConfig describes", strict=True)


def _training(args: GRPOConfig) -> dict[str, Any]:
    aggregated = (args.generation_aggregation_steps or 0) * args.per_device_train_batch_size * processes()
    return {
        "training.seed": args.seed,
        "training.batch_size": global_batch(args) // args.num_generations,
        "training.group_size": args.num_generations,
        "training.max_tokens": args.max_completion_length,
        "training.max_prompt_tokens": args.max_prompt_length,
        "training.prompts_per_sampling": aggregated // args.num_generations,
        "training.temperature": float(args.temperature),
        "training.top_p": float(args.top_p),
        "training.top_k": args.top_k or 0,
        "training.min_p": float(args.min_p or 0.0),
        "training.repetition_penalty": float(args.repetition_penalty),
        "training.lr": float(args.learning_rate),
        "training.weight_decay": float(args.weight_decay),
        "training.keep": args.save_total_limit or _ALL,
    }


def epochs_of(args: GRPOConfig) -> float:
    """Passes over the prompts, all in all."""
    return float(args.num_train_epochs) * args.artificial_epochs


def _lengths(args: GRPOConfig, setup: Setup) -> dict[str, Any]:
    """How long the run is, and how often it saves, evaluates and speaks."""
    epoch = setup.prompts * args.num_generations / global_batch(args)
    total = args.max_steps if args.max_steps > 0 else math.ceil(epoch * epochs_of(args))

    def every(strategy: object, steps: float | None) -> int:
        if name_of(strategy) == "no":
            return 0
        if name_of(strategy) == "epoch":
            return max(1, math.ceil(epoch))
        assert steps is not None
        return max(1, math.ceil(steps * total) if steps < 1 else int(steps))

    evaluates = every(args.eval_strategy, args.eval_steps)
    if evaluates and not setup.held_out:
        raise ConfigError(f"eval_strategy = {name_of(args.eval_strategy)!r} needs an eval_dataset, and there is none.")
    if setup.held_out and not evaluates:
        # `evaluate` may be called later on.
        evaluates = 0
    length = {"training.max_steps": total} if args.max_steps > 0 else {"training.epochs": epochs_of(args)}
    return {
        **length,
        "training.save_every": every(args.save_strategy, args.save_steps) or _ALL,
        "logging.every": every(args.logging_strategy, args.logging_steps),
        "eval.every": evaluates,
        "eval.max_examples": max(1, setup.held_out),
        "eval.samples": args.num_generations_eval or args.num_generations,
    }


def _optimizer(args: GRPOConfig) -> dict[str, Any]:
    schedule_args = dict(args.lr_scheduler_kwargs or {})
    if "min_lr" in schedule_args:
        schedule_args["min_lr_rate"] = schedule_args.pop("min_lr") / args.learning_rate
    return {
        "optimizer.beta1": float(args.adam_beta1),
        "optimizer.beta2": float(args.adam_beta2),
        "optimizer.eps": float(args.adam_epsilon),
        "optimizer.schedule": SCHEDULES[name_of(args.lr_scheduler_type)],
        "optimizer.schedule_args": schedule_args,
        "optimizer.warmup_steps": float(args.warmup_steps),
    }


def _algorithm(args: GRPOConfig) -> dict[str, Any]:
    scaled = args.scale_rewards == "group"
    options: dict[str, Any] = {
        "algorithm.advantage_mode": "grpo_scaled" if scaled else "grpo",
        "algorithm.transform_mode": "none",
        "loss.type": "gspo" if args.importance_sampling_level == "sequence" else LOSSES[args.loss_type],
        "loss.clip_low": float(args.epsilon),
        "loss.clip_high": float(args.epsilon if args.epsilon_high is None else args.epsilon_high),
        "loss.grad_clip": float(args.max_grad_norm),
        "kl.beta": float(args.beta),
        "kl.sync_ref_model": args.sync_ref_model,
    }
    if args.sync_ref_model:
        options["kl.ref_model_mixup_alpha"] = float(args.ref_model_mixup_alpha)
        options["kl.ref_model_sync_steps"] = args.ref_model_sync_steps
    return options


def _model(args: GRPOConfig, setup: Setup) -> dict[str, Any]:
    output_dir = str(args.output_dir)
    kwargs, dtype = split_dtype(args.model_init_kwargs or {})
    named = {True: "bf16", False: "fp32", None: ""}[args.bf16]
    chosen = {name for name in (named, dtype, setup.dtype if not named else "") if name}
    if len(chosen) > 1:
        raise ConfigError(
            f"bf16 = {args.bf16!r} says {named or 'nothing'}, model_init_kwargs say {dtype or 'nothing'}, the model "
            f"is in {setup.dtype or 'no precision yet'}.  Try: bf16, or a dtype, not both"
        )
    gpu = torch.cuda.is_available() and not args.use_cpu
    return {
        **setup.lora,
        "model.model": setup.model,
        "model.dtype": chosen.pop() if chosen else "auto",
        "model.init_kwargs": kwargs,
        "backend.devices": "gpu:0" if gpu else "cpu",
        "backend.adapter_path": str(Path(output_dir) / MODEL_FOLDER),
        "logging.log_dir": output_dir,
    }


def split_dtype(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Arguments of from_pretrained without their dtype, and the dtype as `[model] dtype` has it."""
    rest = {key: value for key, value in kwargs.items() if key not in ("dtype", "torch_dtype")}
    given = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if given is None:
        return rest, ""
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"model_init_kwargs: dtype = {name!r} cannot be trained in.  Try one of: {', '.join(DTYPES)}")
    return rest, DTYPES[name] if name != "auto" else ""


def _inference(args: GRPOConfig) -> dict[str, Any]:
    if args.use_vllm:
        return {
            "inference.engine": "vllm",
            "inference.launch": True,
            "inference.launch_device": args.vllm_device,
            "inference.gpu_memory_utilization": float(args.vllm_gpu_memory_utilization),
            "inference.launch_dtype": args.vllm_dtype,
            "inference.max_model_len": args.vllm_max_model_len or 0,
        }
    if args.use_vllm_server:
        host, port = args.vllm_host or "127.0.0.1", args.vllm_port or 8000
        urls = [f"http://{host}:{port + number}" for number in range(args.num_vllm_clients)]
        return {
            "inference.engine": "vllm",
            "inference.url": ",".join(urls),
            "inference.wait_s": float(args.vllm_server_timeout),
        }
    return {}


def _memory(args: GRPOConfig) -> dict[str, Any]:
    return {
        "memory.gradient_checkpointing": args.gradient_checkpointing,
        "memory.offload_untrained_models": args.offload_untrained_models,
        "memory.micro_batches": args.backprop_accumulation_steps or 0,
        "memory.micro_batch_rows": args.backprop_accumulation_micro_batch_size or 0,
        "distributed.gather_for_generation": args.ds3_gather_for_generation,
        **sharding(os.environ),
    }


def sharding(environment: Mapping[str, str]) -> dict[str, Any]:
    """How weights are sharded: a script is told by `accelerate launch`, through variables of its own."""

    def says(name: str, value: str) -> bool:
        return environment.get(f"ACCELERATE_{name}", "").lower() == value

    return {"distributed.fsdp": True} if says("USE_FSDP", "true") else {}


def _teaching(args: GRPOConfig) -> dict[str, Any]:
    if not args.adaptive_teaching:
        return {}
    return {
        "teaching.enabled": True,
        "teaching.student_model": args.student_model or "",
        "teaching.max_probe_tokens": args.max_probe_tokens,
        "teaching.degradation_penalty_multiplier": float(args.degradation_penalty_multiplier),
        "teaching.efficiency_weight": float(args.efficiency_weight),
        "teaching.student_diagnostic_template": args.student_diagnostic_template or "",
        "teaching.teacher_adaptive_template": args.teacher_adaptive_template or "",
        "teaching.student_with_teaching_template": args.student_with_teaching_template or "",
        "teaching.student_baseline_template": args.student_baseline_template or "",
    }


def _logging(args: GRPOConfig) -> dict[str, Any]:
    trackers, share = trackers_of(args), args.save_completions_probability
    wandb = os.environ.get("WANDB_PROJECT") or args.project
    return {
        "logging.debug": args.activate_debugging_logs,
        "logging.log_completions": args.log_completions,
        "logging.save_completions_probability": 1.0 if share is None else float(share),
        "logging.wandb_project": wandb if "wandb" in trackers else "",
        "logging.trackio_project": args.project if "trackio" in trackers else "",
        "logging.wandb_run_name": args.run_name or "",
    }
