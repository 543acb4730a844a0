"""Composed settings into a training run: GRPO or SFT, with its model, adapter, data and rewards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_type_hints

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from transformers import AutoTokenizer

from retrain.builtin import resolve_model
from retrain.config.schema import Reward as RewardSection
from retrain.data.rows import gsm8k_answer
from retrain.errors import ConfigError, ConfigIssue, PluginError
from retrain.grpo.config import GRPOConfig, rename_dtype
from retrain.grpo.rows import find_idle_splits, load_rows
from retrain.grpo.trainer import GRPOTrainer
from retrain.modeling.tokens import explain_missing_model
from retrain.plugins import REGISTRIES, import_path, make_importable
from retrain.rewards import BatchReward, Item, build_reward
from retrain.runtime.text import plural

CONFIGS = {"grpo": GRPOConfig, "sft": trl.SFTConfig}
SHARED_WITH_DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "max_grad_norm": "ACCELERATE_GRADIENT_CLIPPING",
}
TYPE_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    PositiveInt: "a whole number of at least 1",
    NonNegativeInt: "a whole number, 0 for the full model",
    list[str]: "a list of names",
    dict[str, Any]: "a table",
    Literal["all-linear"]: "all-linear",
}


@dataclass(frozen=True)
class RunSettings:
    """Settings that are not arguments of the trainer's configuration class."""

    trainer_type: str = "grpo"
    model_name_or_path: str = ""
    name: str = ""
    tokenizer_kwargs: dict[str, Any] | None = None
    lora_rank: NonNegativeInt = 0
    lora_alpha: int | float | None = None
    lora_dropout: float = 0.0
    lora_target_modules: Literal["all-linear"] | list[str] = "all-linear"
    dataset_id_or_path: str = ""
    dataset_config: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    max_train_examples: PositiveInt | None = None
    max_val_examples: PositiveInt | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    keep_columns: list[str] | None = None
    system_prompt: str = ""
    completion_only_training: bool | None = None
    artificial_epochs: PositiveInt = 1
    reward_funcs: str | list[str] | None = None
    reward_weights: list[float] | None = None


def run_settings(settings: Mapping[str, Any], log: Callable[[str], None]) -> Any:
    """Train with the trainer that the settings describe, and save the model to output_dir."""
    trainer = build_trainer(settings)
    is_main = trainer.accelerator.is_main_process
    if is_main:
        label = settings.get("name") or settings["model_name_or_path"]
        log(f"{label} on {settings['dataset_id_or_path']}: {len(trainer.train_dataset)} prompts")
    name = "reward" if isinstance(trainer, GRPOTrainer) else "loss"
    with contextlib.ExitStack() as pools:
        for function in trainer.reward_funcs if name == "reward" else ():
            if isinstance(function, NamedReward):
                pools.callback(function.close)
        result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    found = [row[f"eval_{name}"] for row in trainer.state.log_history if f"eval_{name}" in row]
    held_out = f", held-out {name} {found[0]:.4f} before and {found[-1]:.4f} after" if found else ""
    if is_main:
        log(f"Done: {plural(result.global_step, 'step')}{held_out}, logs in {trainer.args.output_dir}.")
    return trainer


def build_trainer(settings: Mapping[str, Any]) -> Any:
    """A GRPOTrainer or TRL's SFTTrainer. Unknown settings and unusable values raise ConfigError."""
    kind = settings.get("trainer_type", "grpo")
    if kind not in CONFIGS:
        raise ConfigError(f"trainer_type must be grpo or sft, got {kind!r}.")
    arguments = {field.name for field in dataclasses.fields(CONFIGS[kind]) if field.init}
    _check_names(settings, arguments)
    hints = get_type_hints(RunSettings, include_extras=True) | get_type_hints(CONFIGS[kind])
    # transformers takes `true` for the newest checkpoint, which its annotation leaves out.
    values = _check_types(settings, hints | {"resume_from_checkpoint": bool | str | None})
    own = {field.name for field in dataclasses.fields(RunSettings)}
    run = RunSettings(**{key: value for key, value in values.items() if key in own})
    _check_run(run)
    given = {key: value for key, value in values.items() if key in arguments}
    try:
        return _build(run, CONFIGS[kind], _complete(given, run))
    except (ValueError, TypeError, ImportError, ZeroDivisionError, OSError) as error:
        # TRL, transformers and accelerate explain what they cannot use.
        raise ConfigError(f"the composed settings cannot be run: {' '.join(str(error).split())}") from error


def _build(run: RunSettings, config_class: Any, arguments: dict[str, Any]) -> Any:
    is_sft = run.trainer_type == "sft"
    more = {} if is_sft else {"reward_funcs": load_rewards(run.reward_funcs)}
    # Before the model: with ZeRO-3, models that are loaded later are sharded at once.
    args = config_class(**arguments)
    train_rows = load_rows(run, run.train_split or "train", run.max_train_examples, is_sft)
    held_out = load_rows(run, run.val_split, run.max_val_examples, is_sft) if run.val_split else []
    return (trl.SFTTrainer if is_sft else GRPOTrainer)(
        model=resolve_model(run.model_name_or_path),
        args=args,
        train_dataset=Dataset.from_list(train_rows),
        eval_dataset=Dataset.from_list(held_out) if held_out else None,
        processing_class=load_tokenizer(run.model_name_or_path, run.tokenizer_kwargs),
        peft_config=read_lora(run),
        **more,
    )


def _complete(arguments: dict[str, Any], run: RunSettings) -> dict[str, Any]:
    """Arguments that follow from other settings or from this machine."""
    under_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not torch.accelerator.is_available():
        arguments.setdefault("bf16", False)
        # accelerate ignores DeepSpeed with use_cpu, and without a backend it counts one process.
        arguments |= {"use_cpu": False, "ddp_backend": "gloo"} if under_deepspeed else {"use_cpu": True}
    for name, variable in SHARED_WITH_DEEPSPEED.items() if under_deepspeed else ():
        # transformers requires equal values in both; the run overrides accelerate's file.
        if name in arguments:
            os.environ[variable] = str(arguments[name])
        elif os.environ.get(variable, "auto") != "auto":
            arguments[name] = json.loads(os.environ[variable])
    if run.val_split and "eval_strategy" not in arguments:
        # Before the first step and after the last one; a fraction is of all steps, rounded up.
        arguments |= {"eval_strategy": "steps", "eval_steps": 1 - 1e-9, "eval_on_start": True}
    if run.trainer_type == "grpo":
        rows = arguments.get("per_device_train_batch_size", 8)
        generations = arguments.get("num_generations_eval") or arguments.get("num_generations", 8)
        # Groups must not be split; TRL's default of 8 rows would be slow, or too few for a group.
        return {"per_device_eval_batch_size": max(1, rows // generations) * generations, **arguments}
    arguments["model_init_kwargs"] = rename_dtype(arguments.get("model_init_kwargs"))
    if run.completion_only_training is not None:
        arguments["completion_only_loss"] = run.completion_only_training
    arguments["num_train_epochs"] = arguments.get("num_train_epochs", 3) * run.artificial_epochs
    return arguments


def _check_names(settings: Mapping[str, Any], arguments: set[str]) -> None:
    known = [*arguments, *(field.name for field in dataclasses.fields(RunSettings))]
    issues = []
    for key in settings:
        if key in known:
            continue
        close = get_close_matches(key[:60], known, n=1)
        hint = f"Did you mean {close[0]}?" if close else "docs/trl.md lists all settings."
        others = [kind for kind in CONFIGS if key in get_type_hints(CONFIGS[kind])]
        text = f"unknown setting {key!r}." if not others else f"{key} is a setting of trainer_type: {others[0]}."
        issues.append(ConfigIssue(text, "", "" if others else hint))
    if issues:
        raise ConfigError("the composed settings cannot be run:", tuple(issues))


def _check_types(settings: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values, of the declared types: a number that YAML read as a string is a number."""
    values, issues = {}, []
    for key, value in settings.items():
        try:
            values[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValidationError as error:
            parts = [hints[key], *get_args(hints[key])]
            names = [TYPE_NAMES[part] for part in parts if part in TYPE_NAMES]
            wanted = " or ".join(names) or str(error.errors()[0]["msg"])
            issues.append(ConfigIssue(key, f"must be {wanted}, got {value!r}."))
    if issues:
        raise ConfigError("the composed settings cannot be run:", tuple(issues))
    return values


def _check_run(run: RunSettings) -> None:
    issues = []
    is_grpo = run.trainer_type == "grpo"
    required = {"model_name_or_path": "builtin:tiny", "dataset_id_or_path": "arithmetic"}
    for name, example in (required | {"reward_funcs": "match"} if is_grpo else required).items():
        if not getattr(run, name):
            issues.append(ConfigIssue(name, "is missing.", f"Try: {name}={example}"))
    if is_grpo and run.completion_only_training is False:
        text = "= false cannot be used: GRPO trains on sampled tokens, never on prompts."
        issues.append(ConfigIssue("completion_only_training", text, "Leave it out."))
    for field in dataclasses.fields(RunSettings):
        value = getattr(run, field.name)
        if field.name.startswith("lora_") and not run.lora_rank and value != field.default:
            issues.append(ConfigIssue(field.name, f"= {value!r} has no effect: it needs lora_rank."))
    issues += find_idle_splits(run)
    if issues:
        raise ConfigError("the composed settings cannot be run:", tuple(issues))


def read_lora(run: RunSettings) -> LoraConfig | None:
    """The adapter, or None to train the full model."""
    if not run.lora_rank:
        return None
    return LoraConfig(
        r=run.lora_rank,
        lora_alpha=2 * run.lora_rank if run.lora_alpha is None else run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_target_modules,
        task_type="CAUSAL_LM",
    )


def load_tokenizer(model: str, kwargs: dict[str, Any] | None) -> Any:
    """The model's tokenizer, made with the given arguments."""
    try:
        return AutoTokenizer.from_pretrained(resolve_model(model), **(kwargs or {}))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(explain_missing_model(model, error)) from error


class NamedReward:
    """One of retrain's rewards as a reward function of TRL: compares completions with the column `answer`."""

    def __init__(self, name: str) -> None:
        problem = REGISTRIES["reward"].explain_unknown(name)
        if problem:
            raise ConfigError(f"reward_funcs: {problem}")
        self.__name__ = name

    @functools.cached_property
    def pool(self) -> BatchReward:
        """The worker processes, started for the first batch."""
        return build_reward(RewardSection(type=self.__name__))

    def __call__(self, completions: list[Any], answer: list[Any] | None = None, **columns: Any) -> list[float | None]:
        """The rewards of a batch; None where a completion could not be scored."""
        if answer is None:
            raise ConfigError(f"reward_funcs: {self.__name__} needs reference answers.  Try: answer_column=…")
        texts = [each if isinstance(each, str) else each[-1]["content"] or "" for each in completions]
        items = [Item(text, gsm8k_answer(str(one)) or str(one)) for text, one in zip(texts, answer, strict=True)]
        return [score.value if score.counts else None for score in self.pool.score(items)]

    def close(self) -> None:
        """End the worker processes."""
        if "pool" in vars(self):
            self.pool.close()
            del self.pool


def load_rewards(given: str | list[str] | None) -> list[Any]:
    """Reward functions: retrain's by name, `module:function` from the working directory or an installed package."""
    rewards: list[Any] = []
    for name in [given] if isinstance(given, str) else given or []:
        if ":" not in name:
            rewards.append(NamedReward(name))
            continue
        make_importable((".",))
        try:
            rewards.append(import_path(name, "reward"))
        except PluginError as error:
            raise ConfigError(f"reward_funcs: {error}") from error
    return rewards
