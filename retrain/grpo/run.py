"""A YAML run: GRPO or SFT with its model, adapter, data and rewards."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    SchedulerType,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from retrain.builtin import resolve_model
from retrain.errors import ConfigError
from retrain.grpo.checks import choose_checkpoint, read_history
from retrain.grpo.config import GRPOConfig, rename_dtype
from retrain.grpo.rewards import NamedReward, load_rewards
from retrain.grpo.rows import load_rows, to_dataset
from retrain.grpo.settings import RunSettings, read_settings
from retrain.grpo.trainer import GRPOTrainer
from retrain.modeling.tokens import explain_missing_model
from retrain.runtime.permissions import share_weights
from retrain.runtime.text import plural

SHARED_WITH_DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "max_grad_norm": "ACCELERATE_GRADIENT_CLIPPING",
}
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] or '' }}{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
"""Prompts as in TOML runs with a tokenizer without a chat template; answers of demonstrations end."""


class SharedCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Makes the weights of each checkpoint as readable as its other files."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Called after a checkpoint was written."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        # With save_total_limit, transformers may have deleted it in favor of an earlier run's, with a higher number.
        if args.should_save and folder.is_dir():
            share_weights(folder, TRAINER_STATE_NAME)


def run_settings(settings: Mapping[str, Any], log: Callable[[str], None]) -> Any:
    """Train with the trainer that the settings describe, and save the model to output_dir."""
    trainer = build_trainer(settings)
    trainer.add_callback(SharedCheckpoints())
    args = trainer.args
    say = log if trainer.accelerator.is_main_process else lambda line: None
    label = settings.get("name") or settings["model_name_or_path"]
    say(f"{label} on {settings['dataset_id_or_path']}: {len(trainer.train_dataset)} prompts")
    if PLAIN_TEMPLATE in str(trainer.processing_class.chat_template):
        say("Warning: the tokenizer has no chat template; prompts are given to the model as plain text.")
    is_resumable = any(Path(args.output_dir).glob("checkpoint-*"))
    if not args.resume_from_checkpoint and (is_resumable or (Path(args.output_dir) / TRAINER_STATE_NAME).exists()):
        resume = "resume_from_checkpoint=true to continue it, or " if is_resumable else ""
        say(f"Warning: {args.output_dir} already contains an earlier run.  Try: {resume}output_dir=…")
    checkpoint = choose_checkpoint(args.output_dir, args.resume_from_checkpoint)
    for line in describe_resume(checkpoint, args) if checkpoint is not None else ():
        say(line)
    # Rows before a resume may be of other problems. The checkpoint may be gone at the end (save_total_limit).
    rows_before = len(read_history(checkpoint / TRAINER_STATE_NAME)) if checkpoint is not None else 0
    name = "reward" if isinstance(trainer, GRPOTrainer) else "loss"
    started = time.time()
    with contextlib.ExitStack() as pools:
        for function in trainer.reward_funcs if name == "reward" else ():
            if isinstance(function, NamedReward):
                pools.callback(function.close)
        try:
            result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt:
            say(describe_interrupt(args.output_dir, trainer.state.global_step, started, checkpoint))
            raise
    trainer.save_model()
    trainer.save_state()
    if trainer.accelerator.is_main_process:
        share_weights(Path(args.output_dir), TRAINER_STATE_NAME)
    rows = trainer.state.log_history[rows_before:]
    found = {row["step"]: row[f"eval_{name}"] for row in rows if f"eval_{name}" in row}
    held_out = f", held-out {name} {describe_change(found, result.global_step)}" if found else ""
    say(f"Done: {plural(result.global_step, 'step')}{held_out}, logs in {args.output_dir}.")
    return trainer


def describe_change(values: Mapping[int, float], steps: int) -> str:
    """The first and the last of some evaluations of a run with so many steps."""
    when = {0: "before", steps: "after"}
    ends = dict.fromkeys((min(values), max(values)))
    # After a resume, each has its step.
    names = when if 0 in ends else {}
    return " and ".join(f"{values[step]:.4f} {names.get(step, f'after step {step}')}" for step in ends)


def describe_interrupt(output_dir: str, step: int, started: float, resumed: Path | None) -> str:
    """A line that says where a run was interrupted and how to resume it; `started` in seconds since the epoch."""
    states = Path(output_dir).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
    own = [state.parent for state in states if state.stat().st_mtime >= started]
    newest = max(own, key=lambda path: path.stat().st_mtime, default=resumed)
    if newest is None:
        return f"Stopped at step {step}, before the first checkpoint: there is one every save_steps steps."
    how = "true" if own else newest
    return f"Stopped at step {step}.  To resume from {newest}: the same command with resume_from_checkpoint={how}"


def describe_resume(checkpoint: Path, args: TrainingArguments) -> Iterator[str]:
    """Lines that say what is resumed, that a learning rate other than the checkpoint's has no effect, and that another
    number of steps changes the schedule."""
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):  # transformers reports what is missing
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        yield f"Resuming from {checkpoint} at step {state['global_step']}."
        schedule, steps = SchedulerType(args.lr_scheduler_type).value, args.max_steps
        if steps <= 0:
            steps = round(args.num_train_epochs * state["global_step"] / state["epoch"])
        # A number of epochs gives the steps up to rounding.
        is_changed = abs(steps - state["max_steps"]) > (0 if args.max_steps > 0 else 1)
        if is_changed and not schedule.startswith("constant"):
            yield (
                f"Note: this run has {plural(steps, 'step')}, and that of the checkpoint had {state['max_steps']}: the "
                f"{schedule} schedule now spans these steps, so the learning rate jumps."
            )
    # DeepSpeed has folders of its own.
    if not any(next(checkpoint.glob(name), None) for name in (SCHEDULER_NAME, "global_step*")):
        yield (
            f"Warning: {checkpoint} has weights only (save_only_model): the optimizer, the learning rate schedule and "
            "the random numbers start anew."
        )
    if (checkpoint / SCHEDULER_NAME).is_file():
        rates = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True).get("base_lrs", [])
        if rates and args.learning_rate not in rates:
            yield (
                f"Note: learning_rate={args.learning_rate:g} has no effect: a resumed run restores the schedule of its "
                f"checkpoint, which has {rates[0]:g}."
            )


def build_trainer(settings: Mapping[str, Any]) -> Any:
    """A GRPOTrainer or TRL's SFTTrainer. Unknown settings and unusable values raise ConfigError."""
    run, arguments = read_settings(settings)
    is_sft = run.trainer_type == "sft"
    more = {} if is_sft else {"reward_funcs": load_rewards(run.reward_funcs)}
    try:
        # Created before the model: with ZeRO-3, models that are loaded later are sharded immediately.
        args = (trl.SFTConfig if is_sft else GRPOConfig)(**_complete(arguments, run))
        train_rows = load_rows(run, run.train_split or "train", run.max_train_examples, is_sft)
        held_out = load_rows(run, run.val_split, run.max_val_examples, is_sft) if run.val_split else []
        tokenizer = load_tokenizer(run)
        # SFT of `text` needs no template, and may name one.
        if not tokenizer.chat_template and "prompt" in train_rows[0] and not arguments.get("chat_template_path"):
            tokenizer.chat_template = plain_template(tokenizer)
        return (trl.SFTTrainer if is_sft else GRPOTrainer)(
            model=resolve_model(run.model_name_or_path),
            args=args,
            train_dataset=to_dataset(train_rows),
            eval_dataset=to_dataset(held_out) if held_out else None,
            processing_class=tokenizer,
            peft_config=read_lora(run),
            **more,
        )
    except (ValueError, TypeError, ImportError, ArithmeticError, OSError) as error:
        # TRL, transformers and accelerate explain what they cannot use.
        raise ConfigError(f"the composed settings cannot be run: {' '.join(str(error).split())}") from error


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


def plain_template(tokenizer: Any) -> str:
    """The plain template, after a first token if the tokenizer begins every text with it."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return ("{{ bos_token }}" if begins else "") + PLAIN_TEMPLATE


def load_tokenizer(run: RunSettings) -> Any:
    """The model's tokenizer, loaded with the given arguments."""
    name = run.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name), **(run.tokenizer_kwargs or {}))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(explain_missing_model(name, error, "model_name_or_path")) from error
