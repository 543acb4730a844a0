"""retrain.grpo.GRPOConfig: the parameters of the specification, their defaults, and wrong values."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import HfArgumentParser, TrainingArguments

from retrain.errors import ConfigError, MissingExtraError
from retrain.grpo import GRPOConfig
from retrain.grpo.config import add_missing_fields, different_defaults

DEFAULTS: dict[str, Any] = {
    "model_init_kwargs": None, "remove_unused_columns": False, "num_generations": 8, "max_prompt_length": 512,
    "max_completion_length": 256, "generation_aggregation_steps": None, "temperature": 0.7, "top_p": 1.0,
    "top_k": None, "min_p": None, "repetition_penalty": 1.0, "use_vllm": False, "vllm_device": "auto",
    "vllm_gpu_memory_utilization": 0.9, "vllm_dtype": "auto", "vllm_max_model_len": None, "use_vllm_server": False,
    "vllm_host": None, "vllm_port": None, "vllm_server_timeout": 120.0, "num_vllm_clients": 1,
    "learning_rate": 1e-6, "beta": 0.04, "reward_weights": None, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64, "ds3_gather_for_generation": True,
    "offload_untrained_models": False, "backprop_accumulation_steps": None,
    "backprop_accumulation_micro_batch_size": None, "max_probe_tokens": 50, "degradation_penalty_multiplier": 2.0,
    "efficiency_weight": 1.0, "student_diagnostic_template": None, "teacher_adaptive_template": None,
    "student_with_teaching_template": None, "student_baseline_template": None, "activate_debugging_logs": False,
    "log_completions": False, "save_completions_probability": None, "artificial_epochs": 1,
}  # fmt: skip


def config(tmp_path: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **given)


def test_every_parameter_has_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert len(DEFAULTS) == 42
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
    assert issubclass(GRPOConfig, trl.GRPOConfig) and issubclass(GRPOConfig, TrainingArguments)


def test_other_names_of_trl_parameters_set_them(tmp_path: Path) -> None:
    given = config(
        tmp_path, use_vllm_server=True, vllm_host="node7", vllm_port=8123, vllm_max_model_len=900,
        gradient_accumulation_steps=4, generation_aggregation_steps=2,
    )  # fmt: skip
    assert (given.use_vllm, given.vllm_mode) == (True, "server")
    assert (given.vllm_server_host, given.vllm_server_port, given.vllm_max_model_length) == ("node7", 8123, 900)
    assert given.steps_per_generation == 2


def test_the_old_name_of_the_precision_is_understood(tmp_path: Path) -> None:
    as_json = config(tmp_path, model_init_kwargs='{"torch_dtype": "float16"}')
    assert as_json.model_init_kwargs == {"dtype": "float16"}
    given = config(tmp_path, model_init_kwargs={"torch_dtype": "float16", "use_cache": False})
    assert given.model_init_kwargs == {"dtype": "float16", "use_cache": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_prompt_length": 0}, "max_prompt_length must be a whole number of at least 1"),
        ({"max_prompt_length": "x"}, "max_prompt_length must be a whole number of at least 1, got 'x'"),
        ({"artificial_epochs": 0}, "artificial_epochs must be a whole number of at least 1"),
        ({"max_probe_tokens": 0}, "max_probe_tokens must be a whole number of at least 1"),
        ({"efficiency_weight": -1.0}, "efficiency_weight must be a number of at least 0"),
        ({"save_completions_probability": 1.5}, "between 0 and 1"),
        ({"generation_aggregation_steps": 2, "steps_per_generation": 2}, "two names of one setting"),
        ({"backprop_accumulation_steps": 2, "backprop_accumulation_micro_batch_size": 2}, "alternatives"),
        ({"num_vllm_clients": 2}, "TRL samples through one client"),
        ({"vllm_device": "cuda:1"}, "use_vllm_server=True"),
        ({"vllm_dtype": "int4"}, "auto, float16 or bfloat16"),
        ({"teacher_adaptive_template": "Teach {question}."}, "has no {approach}"),
    ],
)
def test_wrong_values_are_reported(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **given)


def test_the_command_line_parser_of_transformers_reads_it(tmp_path: Path) -> None:
    parsed, *_ = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--beta", "0.1", "--max_prompt_length", "32"]
    )
    assert (parsed.beta, parsed.max_prompt_length) == (0.1, 32)


def test_a_plain_trl_config_gets_no_limit_and_no_extras(tmp_path: Path) -> None:
    plain = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    add_missing_fields(plain)
    assert (plain.max_prompt_length, plain.adaptive_teaching, plain.artificial_epochs) == (None, False, 1)
    assert (plain.beta, plain.temperature) == (0.0, 1.0)


def test_only_defaults_that_differ_are_listed(tmp_path: Path) -> None:
    assert different_defaults(config(tmp_path, ref_model_sync_steps=512, temperature=1.0)) == {
        "max_completion_length": (256, 512),
        "beta": (0.04, 0.0),
        "vllm_gpu_memory_utilization": (0.9, 0.3),
        "vllm_server_timeout": (120.0, 240.0),
        "ref_model_mixup_alpha": (0.9, 0.6),
    }


def test_a_missing_trl_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("retrain.grpo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError, match=r'trl, which is not installed.  Try: pip install -e ".*\[grpo\]"'):
        importlib.import_module("retrain.grpo").GRPOTrainer  # noqa: B018
