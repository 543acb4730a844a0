"""What a GRPOConfig becomes in retrain's own terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retrain.config.options import values_of
from retrain.errors import ConfigError
from retrain.grpo import GRPOConfig
from retrain.grpo.mapping import Setup, to_train_config
from retrain.grpo.parameters import declarations

SETUP = Setup("builtin:tiny", prompts=40, held_out=8, lora={"model.lora_rank": 8})
VLLM, SERVER = {"use_vllm": True}, {"use_vllm_server": True}
SYNC = {"sync_ref_model": True}
WANDB = {"report_to": "wandb"}
TEACH = {"adaptive_teaching": True}
EVAL = {"eval_strategy": "steps", "eval_steps": 5}

# Parameter, other arguments that it needs, its value, the option that it becomes, and the value of that.
TWINS: list[tuple[str, dict[str, Any], Any, str, Any]] = [
    ("model_init_kwargs", {}, {"trust_remote_code": False}, "model.init_kwargs", {"trust_remote_code": False}),
    ("remove_unused_columns", {}, True, "data.remove_unused_columns", True),
    ("artificial_epochs", {"num_train_epochs": 1.5}, 2, "training.epochs", 3.0),
    ("num_generations", {}, 4, "training.group_size", 4),
    ("max_prompt_length", {}, 100, "training.max_prompt_tokens", 100),
    ("max_completion_length", {}, 32, "training.max_tokens", 32),
    ("generation_aggregation_steps", {"gradient_accumulation_steps": 4}, 2, "training.prompts_per_sampling", 2),
    ("temperature", {}, 1, "training.temperature", 1.0),
    ("top_p", {}, 0.9, "training.top_p", 0.9),
    ("top_k", {}, 20, "training.top_k", 20),
    ("min_p", {}, 0.1, "training.min_p", 0.1),
    ("repetition_penalty", {}, 1.1, "training.repetition_penalty", 1.1),
    ("use_vllm", {}, True, "inference.launch", True),
    ("vllm_device", VLLM, "cuda:1", "inference.launch_device", "cuda:1"),
    ("vllm_gpu_memory_utilization", VLLM, 0.5, "inference.gpu_memory_utilization", 0.5),
    ("vllm_dtype", VLLM, "bfloat16", "inference.launch_dtype", "bfloat16"),
    ("vllm_max_model_len", VLLM, 4096, "inference.max_model_len", 4096),
    ("use_vllm_server", {}, True, "inference.url", "http://127.0.0.1:8000"),
    ("vllm_host", SERVER, "gpu1", "inference.url", "http://gpu1:8000"),
    ("vllm_port", SERVER, 9000, "inference.url", "http://127.0.0.1:9000"),
    ("vllm_server_timeout", SERVER, 30, "inference.wait_s", 30.0),
    ("num_vllm_clients", SERVER, 2, "inference.url", "http://127.0.0.1:8000,http://127.0.0.1:8001"),
    ("learning_rate", {}, 3e-5, "training.lr", 3e-5),
    ("beta", {}, 0.1, "kl.beta", 0.1),
    ("sync_ref_model", {}, True, "kl.sync_ref_model", True),
    ("ref_model_mixup_alpha", SYNC, 0.5, "kl.ref_model_mixup_alpha", 0.5),
    ("ref_model_sync_steps", SYNC, 8, "kl.ref_model_sync_steps", 8),
    ("offload_untrained_models", {}, True, "memory.offload_untrained_models", True),
    ("backprop_accumulation_steps", {}, 4, "memory.micro_batches", 4),
    ("backprop_accumulation_micro_batch_size", {}, 2, "memory.micro_batch_rows", 2),
    ("adaptive_teaching", {}, True, "teaching.enabled", True),
    ("student_model", TEACH, "builtin:tiny", "teaching.student_model", "builtin:tiny"),
    ("max_probe_tokens", TEACH, 20, "teaching.max_probe_tokens", 20),
    ("degradation_penalty_multiplier", TEACH, 3, "teaching.degradation_penalty_multiplier", 3.0),
    ("efficiency_weight", TEACH, 0.5, "teaching.efficiency_weight", 0.5),
    ("student_diagnostic_template", TEACH, "{question}?", "teaching.student_diagnostic_template", "{question}?"),
    (
        "teacher_adaptive_template",
        TEACH,
        "{question} {approach}",
        "teaching.teacher_adaptive_template",
        "{question} {approach}",
    ),
    (
        "student_with_teaching_template",
        TEACH,
        "{question} {teaching}",
        "teaching.student_with_teaching_template",
        "{question} {teaching}",
    ),
    ("student_baseline_template", TEACH, "{question}!", "teaching.student_baseline_template", "{question}!"),
    ("activate_debugging_logs", {}, True, "logging.debug", True),
    ("log_completions", WANDB, True, "logging.log_completions", True),
    ("save_completions_probability", {}, 0.25, "logging.save_completions_probability", 0.25),
    ("save_completions_probability", {}, None, "logging.save_completions_probability", 1.0),
    ("loss_type", {}, "dapo", "loss.type", "ppo"),
    ("loss_type", {}, "dr_grpo", "loss.type", "dr_grpo"),
    ("loss_type", {}, "grpo", "loss.type", "grpo"),
    ("importance_sampling_level", {}, "sequence", "loss.type", "gspo"),
    ("epsilon", {}, 0.1, "loss.clip_low", 0.1),
    ("epsilon", {}, 0.1, "loss.clip_high", 0.1),
    ("epsilon_high", {}, 0.3, "loss.clip_high", 0.3),
    ("scale_rewards", {}, "group", "algorithm.advantage_mode", "grpo_scaled"),
    ("scale_rewards", {}, True, "algorithm.advantage_mode", "grpo_scaled"),
    ("scale_rewards", {}, "none", "algorithm.advantage_mode", "grpo"),
    ("scale_rewards", {}, False, "algorithm.advantage_mode", "grpo"),
    ("num_generations_eval", EVAL, 2, "eval.samples", 2),
    ("output_dir", {}, "here", "logging.log_dir", "here"),
    ("per_device_train_batch_size", {}, 16, "training.batch_size", 2),
    ("gradient_accumulation_steps", {}, 3, "training.batch_size", 3),
    ("num_train_epochs", {}, 2, "training.epochs", 2.0),
    ("max_steps", {}, 7, "training.max_steps", 7),
    ("lr_scheduler_type", {}, "cosine", "optimizer.schedule", "cosine"),
    (
        "lr_scheduler_kwargs",
        {"lr_scheduler_type": "polynomial"},
        {"power": 2.0},
        "optimizer.schedule_args",
        {"power": 2.0},
    ),
    ("warmup_steps", {}, 3, "optimizer.warmup_steps", 3.0),
    ("weight_decay", {}, 0.1, "training.weight_decay", 0.1),
    ("adam_beta1", {}, 0.8, "optimizer.beta1", 0.8),
    ("adam_beta2", {}, 0.9, "optimizer.beta2", 0.9),
    ("adam_epsilon", {}, 1e-6, "optimizer.eps", 1e-6),
    ("max_grad_norm", {}, 0.3, "loss.grad_clip", 0.3),
    ("bf16", {}, False, "model.dtype", "fp32"),
    ("bf16", {"use_cpu": True}, True, "model.dtype", "bf16"),
    ("bf16", {}, None, "model.dtype", "auto"),
    ("gradient_checkpointing", {}, True, "memory.gradient_checkpointing", True),
    ("logging_strategy", {}, "no", "logging.every", 0),
    ("logging_steps", {}, 7, "logging.every", 7),
    ("report_to", {}, "wandb", "logging.wandb_project", "huggingface"),
    ("report_to", {}, ["trackio"], "logging.trackio_project", "huggingface"),
    ("run_name", WANDB, "one", "logging.wandb_run_name", "one"),
    ("project", WANDB, "mine", "logging.wandb_project", "mine"),
    ("save_strategy", {"max_steps": 9}, "no", "training.save_every", 2**31),
    ("save_steps", {}, 25, "training.save_every", 25),
    ("save_total_limit", {}, 3, "training.keep", 3),
    ("save_total_limit", {}, None, "training.keep", 2**31),
    ("eval_strategy", {"eval_steps": 4}, "steps", "eval.every", 4),
    ("eval_steps", {"eval_strategy": "steps"}, 6, "eval.every", 6),
    ("seed", {}, 3, "training.seed", 3),
    ("use_cpu", {}, True, "backend.devices", "cpu"),
]
# These have no option of their own, or one that a trainer fills in; other tests have them.
ELSEWHERE = {
    "chat_template_kwargs", "reward_weights", "ds3_gather_for_generation", "num_iterations",
    "mask_truncated_completions", "optim", "gradient_checkpointing_kwargs", "disable_tqdm", "resume_from_checkpoint",
}  # fmt: skip


def options(setup: Setup = SETUP, **arguments: Any) -> dict[str, Any]:
    return values_of(to_train_config(GRPOConfig(**{"output_dir": "out", **arguments}), setup))


@pytest.mark.parametrize(("name", "others", "value", "option", "expected"), TWINS)
def test_a_parameter_reaches_its_twin(
    name: str, others: dict[str, Any], value: Any, option: str, expected: Any
) -> None:
    assert options(**others, **{name: value})[option] == expected


def test_every_parameter_is_tried() -> None:
    tried = {row[0] for row in TWINS}
    assert tried | ELSEWHERE == set(declarations(GRPOConfig)) and not tried & ELSEWHERE
    own = "test_a_parameter_reaches_its_twin"
    assert tried == {name for name, each in declarations(GRPOConfig).items() if own in each.tested_by.split()}
    section = {name: declared.twin for name, declared in declarations(GRPOConfig).items()}
    for name, _, _, option, _ in TWINS:
        table, _, key = option.partition(".")
        assert f"[{table}]" in section[name] and (key in section[name] or "`url`" in section[name]), (name, option)


def test_defaults_make_a_run_of_the_documented_numbers() -> None:
    found = options(Setup("builtin:tiny", prompts=40))
    assert (found["training.batch_size"], found["training.group_size"], found["training.max_tokens"]) == (1, 8, 256)
    assert (found["training.max_prompt_tokens"], found["training.lr"], found["kl.beta"]) == (512, 1e-6, 0.04)
    assert (found["model.lora_rank"], found["training.epochs"], found["inference.engine"]) == (0, 3.0, "pytorch")
    assert found["algorithm.transform_mode"] == "none" and found["optimizer.schedule"] == "linear"


def test_vllm_is_either_launched_or_found() -> None:
    launched, found = options(use_vllm=True), options(use_vllm_server=True, vllm_port=8000)
    assert (launched["inference.engine"], launched["inference.launch"], launched["inference.url"]) == ("vllm", True, "")
    assert (found["inference.engine"], found["inference.launch"], found["inference.wait_s"]) == ("vllm", False, 120.0)


def test_servers_are_given_adapters_only() -> None:
    with pytest.raises(ConfigError, match="use_vllm_server needs a peft_config"):
        options(Setup("builtin:tiny", prompts=40), use_vllm_server=True)


def test_aggregation_counts_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 4}
    assert options(**arguments)["training.prompts_per_sampling"] == 0
    assert options(**arguments, generation_aggregation_steps=3)["training.prompts_per_sampling"] == 6


def test_epochs_multiply() -> None:
    assert options(num_train_epochs=0.5, artificial_epochs=3)["training.epochs"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "save", "log", "evaluate"),
    [
        ({"max_steps": 200, "save_steps": 0.25, "logging_steps": 0.1, "eval_steps": 0.5}, 50, 20, 100),
        ({"num_train_epochs": 2, "save_steps": 0.5, "logging_steps": 1, "eval_steps": 3}, 40, 1, 3),
        ({"save_strategy": "epoch", "logging_strategy": "epoch", "eval_strategy": "epoch"}, 40, 40, 40),
        ({"save_strategy": "no", "logging_strategy": "no", "eval_strategy": "no"}, 2**31, 0, 0),
        ({"max_steps": 3, "logging_steps": 0.1, "eval_strategy": "steps"}, 500, 1, 1),
    ],
)
def test_intervals(arguments: dict[str, Any], save: int, log: int, evaluate: int) -> None:
    arguments = {"eval_strategy": "steps" if "eval_steps" in arguments else "no", **arguments}
    found = options(**arguments)
    assert (found["training.save_every"], found["logging.every"], found["eval.every"]) == (save, log, evaluate)


def test_an_evaluation_needs_something_to_evaluate_on() -> None:
    with pytest.raises(ConfigError, match="needs an eval_dataset"):
        options(Setup("builtin:tiny", prompts=4), eval_strategy="steps", eval_steps=2)


@pytest.mark.parametrize(
    ("given", "name"), [("constant_with_warmup", "constant"), ("cosine", "cosine"), ("inverse_sqrt", "inverse_sqrt")]
)
def test_schedules_have_their_names(given: str, name: str) -> None:
    assert options(lr_scheduler_type=given)["optimizer.schedule"] == name


@pytest.mark.parametrize(
    ("given", "dtype"), [("bfloat16", "bf16"), (torch.bfloat16, "bf16"), ("float32", "fp32"), ("auto", "auto")]
)
def test_a_dtype_of_the_model_arguments_is_the_training_precision(given: Any, dtype: str) -> None:
    for key in ("dtype", "torch_dtype"):
        found = options(model_init_kwargs={key: given})
        assert (found["model.dtype"], found["model.init_kwargs"]) == (dtype, {})


def test_a_dtype_that_cannot_be_trained_in_or_contradicts_is_refused() -> None:
    with pytest.raises(ConfigError, match="'float16' cannot be trained in"):
        options(model_init_kwargs={"dtype": "float16"})
    with pytest.raises(ConfigError, match="not both"):
        options(bf16=False, model_init_kwargs={"dtype": "bfloat16"})


def test_wandb_takes_its_project_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert options(report_to="wandb")["logging.wandb_project"] == "theirs"


def test_ungathered_weights_need_zero_3() -> None:
    with pytest.raises(ConfigError, match=r"\[distributed\] gather_for_generation"):
        options(use_vllm_server=True, ds3_gather_for_generation=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"USE_FSDP": "true"}, True),
    ],
)
def test_sharding_is_what_accelerate_was_told(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig("out")
    for name, value in environment.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    assert to_train_config(args, SETUP).distributed.fsdp is expected


def test_ungathered_weights_of_zero_3_reach_their_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    args = GRPOConfig("out", use_vllm_server=True, ds3_gather_for_generation=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert to_train_config(args, SETUP).distributed.gather_for_generation is False


def test_harmless_arguments_are_accepted() -> None:
    options(
        optim="adamw_torch", disable_tqdm=True, num_iterations=1, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
