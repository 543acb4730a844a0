"""GRPOConfig: what the seed of its parameters says, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from retrain.errors import ConfigError
from retrain.grpo import GRPOConfig
from retrain.grpo.parameters import declarations, is_declared

DOCUMENTED: dict[str, Any] = {
    "model_init_kwargs": None,
    "remove_unused_columns": False,
    "num_generations": 8,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "generation_aggregation_steps": None,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": 1.0,
    "use_vllm": False,
    "vllm_device": "auto",
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_dtype": "auto",
    "vllm_max_model_len": None,
    "use_vllm_server": False,
    "vllm_host": None,
    "vllm_port": None,
    "vllm_server_timeout": 120.0,
    "num_vllm_clients": 1,
    "learning_rate": 1e-6,
    "beta": 0.04,
    "reward_weights": None,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "ds3_gather_for_generation": True,
    "offload_untrained_models": False,
    "backprop_accumulation_steps": None,
    "backprop_accumulation_micro_batch_size": None,
    "max_probe_tokens": 50,
    "degradation_penalty_multiplier": 2.0,
    "efficiency_weight": 1.0,
    "student_diagnostic_template": None,
    "teacher_adaptive_template": None,
    "student_with_teaching_template": None,
    "student_baseline_template": None,
    "activate_debugging_logs": False,
    "log_completions": False,
    "save_completions_probability": None,
    "artificial_epochs": 1,
}

# A value of the wrong type, and where there is a range one out of it.
WRONG: dict[str, tuple[Any, ...]] = {
    "model_init_kwargs": ("float16",),
    "remove_unused_columns": (1,),
    "num_generations": (8.0, 1, 0),
    "max_prompt_length": ("512", 0),
    "max_completion_length": (None, 0),
    "generation_aggregation_steps": (1.0, 0),
    "temperature": ("hot", 0.0, -1, 101, float("nan"), float("inf")),
    "top_p": (None, 0.0, 1.1),
    "top_k": (1.5, -1),
    "min_p": ("0.1", -0.1, 1.1),
    "repetition_penalty": (False, 0.0),
    "use_vllm": ("yes",),
    "vllm_device": (1,),
    "vllm_gpu_memory_utilization": ("0.9", 0.0, 1.1),
    "vllm_dtype": (16, "int8"),
    "vllm_max_model_len": (10.5, 0),
    "use_vllm_server": (1,),
    "vllm_host": (8000,),
    "vllm_port": ("8000", 0, 65536),
    "vllm_server_timeout": ("120", 0.0),
    "num_vllm_clients": (1.0, 0),
    "learning_rate": ("1e-6", 0.0, -1e-6, 11),
    "beta": (None, -0.1),
    "reward_weights": (1.0, ["one"], [float("nan")], (1.0,)),
    "sync_ref_model": ("no",),
    "ref_model_mixup_alpha": ("0.9", -0.1, 1.1),
    "ref_model_sync_steps": (64.0, 0),
    "ds3_gather_for_generation": (0,),
    "offload_untrained_models": ("cpu",),
    "backprop_accumulation_steps": (True, 0),
    "backprop_accumulation_micro_batch_size": (2.0, 0),
    "max_probe_tokens": ("50", 0),
    "degradation_penalty_multiplier": (None, -1.0),
    "efficiency_weight": ([], -0.5),
    "student_diagnostic_template": (1,),
    "teacher_adaptive_template": (["{question}"],),
    "student_with_teaching_template": (1.0,),
    "student_baseline_template": (False,),
    "activate_debugging_logs": ("true",),
    "log_completions": (1,),
    "save_completions_probability": ("half", -0.1, 1.1),
    "artificial_epochs": (1.5, 0),
    "per_device_train_batch_size": (8.0, 0),
    "gradient_accumulation_steps": ("2", 0),
    "max_steps": (10.0, -2),
    "num_train_epochs": ("3", 0),
    "warmup_steps": ("10", -1),
    "max_grad_norm": (None, -1),
    "adam_beta1": (True, 1.5),
    "save_total_limit": (2.0, 0),
    "seed": ("42", -1),
    "epsilon": ("0.2", -0.1),
    "scale_rewards": ("batch", 2),
    "num_iterations": (2,),
    "mask_truncated_completions": (True,),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_parameter_has_its_default(name: str) -> None:
    value = vars(GRPOConfig("out"))[name]
    assert value == DOCUMENTED[name] and type(value) is type(DOCUMENTED[name])
    assert name in declarations(GRPOConfig)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", **{name: value})
    (problem,) = error.value.issues
    assert problem.where == name and repr(value)[:40] in problem.text and f"Try: {name}=" in problem.hint


def test_every_documented_parameter_is_tried_with_a_wrong_value() -> None:
    assert set(DOCUMENTED) <= set(WRONG)


@pytest.mark.parametrize(
    ("arguments", "where", "text"),
    [
        ({"use_vllm": True, "use_vllm_server": True}, "use_vllm", "does not go with use_vllm_server"),
        ({"vllm_port": 8001}, "vllm_port", "needs use_vllm_server=True"),
        ({"vllm_host": "gpu1", "use_vllm": True}, "vllm_host", "needs use_vllm_server=True"),
        ({"num_vllm_clients": 2}, "num_vllm_clients", "needs use_vllm_server=True"),
        ({"vllm_server_timeout": 10.0}, "vllm_server_timeout", "needs use_vllm_server=True"),
        ({"vllm_device": "cuda:1"}, "vllm_device", "needs use_vllm=True"),
        ({"vllm_dtype": "float16", "use_vllm_server": True}, "vllm_dtype", "needs use_vllm=True"),
        ({"vllm_max_model_len": 10}, "vllm_max_model_len", "needs use_vllm=True"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization", "needs use_vllm=True"),
        ({"use_vllm_server": True, "vllm_port": 65535, "num_vllm_clients": 2}, "num_vllm_clients", "port 65536"),
        ({"sync_ref_model": True, "beta": 0.0}, "sync_ref_model", "beta = 0"),
        ({"ref_model_sync_steps": 8}, "ref_model_sync_steps", "needs sync_ref_model=True"),
        ({"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha", "needs sync_ref_model=True"),
        (
            {"backprop_accumulation_steps": 2, "backprop_accumulation_micro_batch_size": 4},
            "backprop_accumulation_steps",
            "does not go with",
        ),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation", "needs whole weights"),
        ({"max_probe_tokens": 10}, "max_probe_tokens", "needs adaptive_teaching=True"),
        ({"student_model": "builtin:tiny"}, "student_model", "needs adaptive_teaching=True"),
        ({"artificial_epochs": 2, "max_steps": 10}, "artificial_epochs", "needs no max_steps"),
        ({"offload_untrained_models": True, "beta": 0.0}, "offload_untrained_models", "needs beta or a student_model"),
        ({"log_completions": True}, "log_completions", "needs report_to"),
        ({"run_name": "one"}, "run_name", "needs report_to"),
        ({"eval_steps": 10}, "eval_steps", "eval_strategy"),
        ({"num_generations_eval": 2}, "num_generations_eval", "needs an eval_strategy"),
        ({"max_steps": 0}, "max_steps", "at least 1"),
        ({"save_steps": 1.5}, "save_steps", "whole number"),
        ({"report_to": "tensorboard"}, "report_to", "not in retrain"),
        ({"report_to": ["wandb", "mlflow"]}, "report_to", "'mlflow'"),
        ({"optim": "adafactor"}, "optim", "not in retrain"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type", "not in retrain"),
        ({"save_strategy": "best"}, "save_strategy", "best model"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "gradient_checkpointing_kwargs", "recomputed"),
        ({"importance_sampling_level": "sequence", "loss_type": "dr_grpo"}, "importance_sampling_level", "does not go"),
    ],
)
def test_a_forbidden_combination_is_refused(arguments: dict[str, Any], where: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", **arguments)
    assert [(problem.where, text in problem.text) for problem in error.value.issues] == [(where, True)]


def test_a_group_must_divide_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", per_device_train_batch_size=5, gradient_accumulation_steps=2, num_generations=4)
    assert str(error.value.issues[0]) == (
        "num_generations = 4 does not divide per_device_train_batch_size 5 × gradient_accumulation_steps 2 × processes "
        "1 = 10 completions a step.  Try: num_generations=2 or 5 or 10, or per_device_train_batch_size=4 or 6"
    )
    GRPOConfig("out", per_device_train_batch_size=6, gradient_accumulation_steps=2, num_generations=4)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
        monkeypatch.setenv(name, value)
    GRPOConfig("out", per_device_train_batch_size=6, num_generations=4)
    assert not torch.distributed.is_initialized() and os.environ["RANK"] == "1"
    with pytest.raises(ConfigError, match=r"× processes 2 = 6 completions a step"):
        GRPOConfig("out", per_device_train_batch_size=3, num_generations=4)


@pytest.mark.parametrize(
    ("steps", "text"),
    [(3, "more than gradient_accumulation_steps = 2"), (1, "4 completions, which num_generations = 8")],
)
def test_aggregation_must_fit_the_step(steps: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GRPOConfig(
            "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, generation_aggregation_steps=steps
        )


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("student_diagnostic_template", ("question",)),
        ("teacher_adaptive_template", ("question", "approach")),
        ("student_with_teaching_template", ("question", "teaching")),
        ("student_baseline_template", ("question",)),
    ],
)
def test_a_template_must_hold_its_variables(name: str, variables: tuple[str, ...]) -> None:
    whole = " ".join(f"{{{variable}}}" for variable in variables)
    assert vars(GRPOConfig("out", adaptive_teaching=True, **{name: whole}))[name] == whole
    for variable in variables:
        with pytest.raises(ConfigError, match=rf"{name} lacks \{{{variable}\}}"):
            GRPOConfig("out", adaptive_teaching=True, **{name: whole.replace(f"{{{variable}}}", "")})


@pytest.mark.parametrize("loss", ["sapo", "cispo", "ppo"])
def test_a_loss_that_differs_is_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match="not in retrain"):
        GRPOConfig("out", loss_type=loss)


def test_bnpo_is_dapo_only_without_accumulation() -> None:
    assert GRPOConfig("out", loss_type="bnpo").loss_type == "bnpo"
    with pytest.raises(ConfigError, match="each device's batch by itself"):
        GRPOConfig("out", loss_type="bnpo", gradient_accumulation_steps=2)


def _changed(field: dataclasses.Field[Any]) -> Any:
    """Another value than the default, of a kind that the field could take."""
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, int | float):
        return field.default + 1
    return "something"


INHERITED = [
    field
    for field in dataclasses.fields(GRPOConfig)
    if not is_declared(field) and field.name != "local_rank" and field.init
]


@pytest.mark.parametrize("field", INHERITED, ids=lambda field: field.name)
def test_an_inherited_argument_that_would_be_ignored_is_refused(field: dataclasses.Field[Any]) -> None:
    with pytest.raises(ConfigError, match=f"{field.name} = .* cannot be used: it "):
        GRPOConfig("out", **{field.name: _changed(field)})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"fp16": True}, "Try: bf16=True"), ({"push_to_hub": True}, "hub"), ({"deepspeed": "zero3.json"}, "sharded")],
)
def test_a_refusal_says_why(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GRPOConfig("out", **arguments)


def test_it_is_a_dataclass_of_training_arguments() -> None:
    config = GRPOConfig("out", learning_rate=2e-5)
    assert isinstance(config, TrainingArguments) and dataclasses.is_dataclass(config)
    assert config.to_dict()["learning_rate"] == 2e-5


def test_it_can_be_parsed_from_a_command_line() -> None:
    words = ["--output_dir", "out", "--num_generations", "4", "--beta", "0.1", "--use_cpu", "--loss_type", "dr_grpo"]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    assert (config.num_generations, config.beta, config.loss_type) == (4, 0.1, "dr_grpo")


def test_all_wrong_values_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", top_p=2.0, beta=-1.0, fp16=True)
    assert [problem.where for problem in error.value.issues] == ["fp16", "top_p", "beta"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lerning_rate", "Did you mean learning_rate?"),
        ("vllm_mode", "Try: use_vllm=True"),
        ("warmup_ratio", "Try: warmup_steps below 1"),
        ("qqqqqq", "Leave it out"),
    ],
)
def test_an_argument_that_is_not_there_is_refused_with_what_stands_for_it(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GRPOConfig(**{name: 1})
    assert f"{name} is not known." in str(refused.value) and words in str(refused.value)
