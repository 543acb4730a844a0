"""What options are called elsewhere: in TRL, transformers, vLLM, and by people in a hurry."""

from __future__ import annotations

from difflib import get_close_matches

from retrain.config.options import Option, options_by_path

# Name elsewhere -> our `section.key`.
SYNONYMS = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "advantage": "algorithm.advantage_mode",
    "clip": "loss.clip_high",
    "context_length": "inference.max_model_len",
    "dataset": "data.source",
    "dataset_name": "data.id",
    "engine": "inference.engine",
    "environment": "environment.provider",
    "epsilon": "loss.clip_high",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "gradient_clip": "loss.grad_clip",
    "kl_coef": "kl.beta",
    "learning_rate": "training.lr",
    "log_steps": "logging.every",
    "logging_steps": "logging.every",
    "lora_dropout": "lora.dropout",
    "lora_r": "model.lora_rank",
    "loss": "loss.type",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "training.max_tokens",
    "max_grad_norm": "loss.grad_clip",
    "max_length": "training.max_tokens",
    "max_new_tokens": "training.max_tokens",
    "max_prompt_length": "training.max_prompt_tokens",
    "max_train_samples": "training.max_examples",
    "model_name": "model.model",
    "model_name_or_path": "model.model",
    "num_epochs": "training.epochs",
    "num_generations": "training.group_size",
    "num_iterations": "training.max_steps",
    "num_samples": "training.group_size",
    "num_steps": "training.max_steps",
    "num_train_epochs": "training.epochs",
    "output_dir": "logging.log_dir",
    "per_device_train_batch_size": "training.batch_size",
    "project": "logging.wandb_project",
    "r": "model.lora_rank",
    "rank": "model.lora_rank",
    "report_to": "logging.wandb_project",
    "resume_from_checkpoint": "resume.from",
    "reward": "reward.type",
    "reward_funcs": "reward.type",
    "rollouts": "training.group_size",
    "run_name": "logging.wandb_run_name",
    "save_steps": "training.save_every",
    "save_total_limit": "training.keep",
    "scheduler": "optimizer.schedule",
    "steps": "training.max_steps",
    "train_batch_size": "training.batch_size",
    "transform": "algorithm.transform_mode",
    "warmup": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
}


def find_synonym(name: str) -> Option | None:
    """The option that a key or a flag of another tool stands for."""
    key = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    close = get_close_matches(key[:60], SYNONYMS, n=1, cutoff=0.9)
    return options_by_path()[SYNONYMS[close[0]]] if close else None
