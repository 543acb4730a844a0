"""Each rule, with valid and invalid configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.config import build_config
from retrain.config.options import condition_overrides
from retrain.config.rules import RULES
from retrain.errors import ConfigError

GRPO, MAXRL = {"advantage_mode": "grpo"}, {"advantage_mode": "maxrl"}
LAUNCH = {"engine": "vllm", "launch": True}
JSONL = {"source": "jsonl", "path": "a.jsonl"}
ENVIRONMENT = {"provider": "verifiers", "id": "primeintellect/gsm8k"}

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("check_sharding", {"distributed": {"fsdp": True}, "kl": {"beta": 0.1, "sync_ref_model": True}}),
    (
        "check_sharding",
        {"distributed": {"fsdp": True, "gather_for_generation": False}, "inference": {"engine": "vllm"}},
    ),
    ("check_full_training", {"model": {"lora_rank": 0}}),
    ("check_quantization", {"model": {"quantization": "nf4"}, "inference": {"kv_cache_dtype": "int8"}}),
    ("check_quantization", {"model": {"quantization": "int8", "lora_rank": 4}, "inference": {"dtype": "bf16"}}),
    ("check_init_kwargs", {"model": {"init_kwargs": {"use_cache": False}}}),
    ("check_micro_batches", {"memory": {"micro_batches": 4}}),
    ("check_schedule", {"optimizer": {"schedule": "cosine", "schedule_args": {"min_lr_rate": 0.1}}}),
    ("check_schedule", {"optimizer": {"warmup_steps": 0.25}}),
    ("check_correct_from", {"reward": {"terms": [{"weight": 0.7}, {"weight": 0.3}]}}),
    ("check_correct_from", {"reward": {"terms": [{"weight": 0.7}], "correct_from": 0.7}}),
    ("check_correct_from", {"reward": {"terms": [{"type": "mine.score", "weight": 0.1}]}}),
    ("check_eval_temperature", {"eval": {"temperature": 0.0}}),
    ("check_eval_temperature", {"eval": {"temperature": -1.0}}),
    ("check_greedy_samples", {"eval": {"every": 5, "temperature": 0.0}}),
    ("check_greedy_samples", {"eval": {"every": 5, "samples": 4}}),
    ("check_names", {"algorithm": {"advantage_mode": "my_package.mine"}}),
    ("check_names", {"algorithm": {"transform_mode": "my_package.sub:mine", "algorithm_mode": ""}}),
    ("check_names", {"reward": {"terms": [{"type": "match"}, {"type": "mine.score", "weight": 0.5}]}}),
    ("check_penalties", {"reward": {"terms": [{}, {"type": "math", "weight": -0.5}]}, "algorithm": GRPO}),
    ("check_penalties", {"reward": {"terms": [{}, {"type": "math", "weight": 0.0}]}, "algorithm": MAXRL}),
    ("check_toml_values", {"environment": {**ENVIRONMENT, "args": '{"a": [1, {"b": "é"}]}'}}),
    ("check_devices", {"backend": {"devices": "cpu"}}),
    ("check_devices", {"backend": {"devices": "auto"}}),
    ("check_devices", {"backend": {"devices": "gpu:0, gpu:1,gpu:17"}}),
    ("check_group_size", {"training": {"group_size": 2}}),
    ("check_ratio_cap", {"loss": {"ratio_cap": 0.0}}),
    ("check_ratio_cap", {"loss": {"type": "ppo", "ratio_cap": 1.0}}),
    ("check_custom_rewards", {"reward": {"type": "custom", "custom_module": "mine"}}),
    ("check_custom_rewards", {"reward": {"type": "judge"}}),
    ("check_judge_url", {"reward": {"type": "judge", "judge_base_url": "http://a:1/v1/@b"}}),
    ("check_judge_url", {"reward": {"type": "judge", "judge_base_url": "HTTP://a:1/v1"}}),
    ("check_arguments", {"model": {"init_kwargs": {"access_token": "<|tool|>", "api_key": "MY_API_KEY"}}}),
    (
        "check_templates",
        {"reward": {"type": "judge", "judge_prompt": r"{question} \boxed{x} \frac{a}{b} {response}"}},
    ),
    ("check_custom_rewards", {"reward": {"terms": [{"type": "custom", "custom_module": "mine"}]}}),
    ("check_custom_rewards", {"reward": {"terms": [{"type": "judge"}]}}),
    ("check_environment", {"environment": {**ENVIRONMENT, "max_turns": 1}}),
    ("check_environment", {"environment": {"provider": "mine.Environment"}}),
    ("check_data_source", {"data": {"source": "jsonl", "path": "problems.jsonl"}}),
    ("check_data_source", {"data": {"source": "mine.Source", "path": "problems.txt"}}),
    ("check_data_source", {"data": {"source": "hub", "id": "openai/gsm8k"}}),
    ("check_data_source", {"data": JSONL, "eval": {"path": "b.jsonl"}}),
    ("check_data_source", {"data": {"source": "mine.Source"}, "eval": {"path": "b.txt"}}),
    ("check_data_source", {"data": {"source": "math"}, "eval": {"source": "jsonl", "path": "b.jsonl"}}),
    ("check_data_source", {"data": JSONL}),
    ("check_dropout", {"backend": {"devices": "gpu:0,gpu:1"}}),
    ("check_dropout", {"lora": {"dropout": 0.1}}),
    ("check_sampling_device", {"inference": {"engine": "vllm"}, "training": {"async_steps": 1}}),
    ("check_sampling_device", {"backend": {"devices": "gpu:0,gpu:1"}, "training": {"async_steps": 1}}),
    ("check_sampling_device", {"backend": {"backend": "tinker"}, "training": {"async_steps": 1}}),
    ("check_pass_at_k", {"eval": {"every": 1, "k": 4, "samples": 4}}),
    ("check_pass_at_k", {"eval": {"k": 5, "samples": 4}}),
    (
        "check_held_out_file",
        {"data": JSONL, "eval": {"every": 5, "source": "jsonl", "path": "b.jsonl"}},
    ),
    ("check_held_out_file", {"data": JSONL, "eval": {"every": 5, "path": "b.jsonl"}}),
    ("check_held_out_split", {"data": {"split": "test"}}),
    ("check_held_out_split", {"data": {"split": "test"}, "eval": {"every": 5, "split": "train"}}),
    ("check_held_out_split", {"eval": {"every": 5, "source": "gsm8k", "split": "train"}}),
    (
        "check_held_out_split",
        {"data": {"source": "mine.Source", "path": "a"}, "eval": {"every": 5, "split": "train", "path": "b"}},
    ),
    ("check_held_out_split", {"data": JSONL, "eval": {"every": 5, "path": "../a.jsonl"}}),
    ("check_held_out_split", {"data": JSONL, "eval": {"path": "a.jsonl"}}),
    ("check_batch_size_bounds", {"backpressure": {"enabled": True, "min_batch_size": 4, "max_batch_size": 4}}),
    ("check_paths", {"logging": {"log_dir": "~/not there/yet"}, "data": {"path": "", "source": "math"}}),
    ("check_urls", {"inference": {"engine": "vllm", "url": "http://localhost:8000, https://a.example/v1"}}),
    ("check_launch_device", {"inference": {**LAUNCH, "launch_device": "cuda:1"}}),
    ("check_strategic_grams", {"logging": {"strategic_grams": '["wait", "let me check"]'}}),
    ("check_strategic_grams", {"logging": {"strategic_grams": "wait, let me check"}}),
    (
        "check_templates",
        {"teaching": {"enabled": True, "teacher_adaptive_template": "{question} {approach}"}, "algorithm": GRPO},
    ),
    (
        "check_templates",
        {
            "teaching": {"enabled": True, "student_baseline_template": "{question} \\boxed{answer} \\frac{a}{b}"},
            "algorithm": GRPO,
        },
    ),
    ("check_teaching_data", {"teaching": {"enabled": True}, "algorithm": GRPO}),
    ("check_teaching_advantage", {"teaching": {"enabled": True}, "algorithm": GRPO}),
    (
        "check_student_weights",
        {"teaching": {"enabled": True, "student_model": "a/b"}, "algorithm": GRPO, "distributed": {"fsdp": True}},
    ),
    ("check_student_weights", {"teaching": {"enabled": True}, "algorithm": GRPO}),
    ("check_teaching_advantage", {"teaching": {"enabled": True}, "algorithm": {"algorithm_mode": "a.b"}}),
    ("check_teaching_advantage", {"teaching": {"enabled": True, "degradation_penalty_multiplier": 0.0}}),
    ("check_teaching_advantage", {"teaching": {"enabled": True}, "campaign": {"conditions": [GRPO]}}),
    ("check_conditions", {"campaign": {"conditions": [GRPO, {"sepa": {"steps": 5}, "lr": 1e-3}]}}),
    ("check_conditions", {"campaign": {"conditions": [{"model": {"lora_rank": 8}}, {"model": "a/b"}]}}),
    ("check_campaign", {"campaign": {"gpus_per_run": 2.0, "executor": "ray", "stop_when": "decided"}}),
]

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("check_sharding", {"distributed": {"fsdp": True}, "campaign": {}}, "each run of a [campaign] is one"),
    (
        "check_sharding",
        {"distributed": {"fsdp": True, "gather_for_generation": False}},
        "= false leaves no rank with full weights",
    ),
    (
        "check_full_training",
        {"model": {"lora_rank": 0}, "inference": {"engine": "vllm"}},
        '[model] lora_rank = 0 trains the full model, and the engine "vllm" is given adapters.',
    ),
    (
        "check_full_training",
        {"model": {"lora_rank": 0}, "backend": {"backend": "tinker"}},
        "tinker trains adapters",
    ),
    (
        "check_quantization",
        {"model": {"quantization": "nf4", "lora_rank": 0}},
        '[model] quantization = "nf4" freezes the weights below an adapter, and lora_rank = 0 trains them.',
    ),
    (
        "check_quantization",
        {"model": {"quantization": "nf4"}, "inference": {"engine": "vllm"}},
        'trains different weights than the engine "vllm" samples from.',
    ),
    (
        "check_quantization",
        {"model": {"quantization": "int8"}, "inference": {"dtype": "fp8"}},
        'is also what is sampled from, so [inference] dtype = "fp8" cannot be.',
    ),
    (
        "check_quantization",
        {"model": {"quantization": "nf4"}, "distributed": {"fsdp": True}},
        "does not go with [distributed] fsdp, which shards weights in floating point.",
    ),
    ("check_init_kwargs", {"model": {"init_kwargs": {"torch_dtype": "float16"}}}, "Try: [model] dtype"),
    ("check_init_kwargs", {"model": {"init_kwargs": {"load_in_4bit": True}}}, 'Try: [model] quantization = "nf4"'),
    (
        "check_micro_batches",
        {"memory": {"micro_batches": 4, "micro_batch_rows": 2}},
        "[memory] micro_batches and micro_batch_rows both size the micro-batches.",
    ),
    ("check_schedule", {"optimizer": {"warmup_steps": 2.5}}, "must be a whole number of steps"),
    ("check_schedule", {"optimizer": {"schedule_args": {"powr": 2}}}, "'constant' does not take.  It takes none."),
    (
        "check_schedule",
        {"optimizer": {"schedule": "cosine", "schedule_args": {"min_lr_rate": 2}}},
        "min_lr_rate = 2, which must be between 0 and 1",
    ),
    (
        "check_schedule",
        {"optimizer": {"schedule": "inverse_sqrt", "schedule_args": {"timescale": True}}},
        "timescale = True, which is not a number",
    ),
    (
        "check_schedule",
        {"optimizer": {"schedule": "polynomial", "schedule_args": {"lr_end": 0.5}}},
        "lr_end that is not below [training] lr",
    ),
    (
        "check_judge_url",
        {"reward": {"type": "judge", "judge_base_url": "http://me:word@a/v1"}},
        "[reward] judge_base_url holds a password",
    ),
    ("check_judge_url", {"reward": {"type": "judge", "judge_base_url": "a:1"}}, "'a:1', not a URL"),
    *(
        (
            "check_judge_url",
            {"reward": {"type": "judge", "judge_base_url": f"http://a:{port}/v1"}},
            f"[reward] judge_base_url has 'http://a:{port}/v1', which has no valid port.  Try: a port from 1 to 65535",
        )
        for port in ("65536", "0", "eighty")
    ),
    (
        "check_judge_url",
        {"reward": {"type": "judge", "judge_base_url": "http://a/v1?api_key=word"}},
        "[reward] judge_base_url holds a query (?...), which a server URL cannot have.  Try: put",
    ),
    (
        "check_judge_url",
        {"reward": {"type": "judge", "judge_base_url": "a/v1?api_key=word"}},
        "is 'a/v1', not a URL",
    ),
    ("check_templates", {"reward": {"type": "judge", "judge_prompt": "ok?"}}, "lacks {response}"),
    (
        "check_templates",
        {"reward": {"type": "judge", "judge_prompt": "{response} {answer}"}},
        "has the unknown variable {answer}.  Variables:",
    ),
    ("check_names", {"inference": {"engine": "vlm"}}, "[inference] engine 'vlm' is not a known inference engine"),
    ("check_names", {"backend": {"backend": ""}}, "[backend] backend '' is not a known backend"),
    (
        "check_names",
        {"reward": {"terms": [{"type": "mtch"}]}},
        "[reward] terms[0].type 'mtch' is not a known reward",
    ),
    ("check_toml_values", {"environment": {**ENVIRONMENT, "args": '{"a": null}'}}, "[environment] args holds null"),
    ("check_toml_values", {"environment": {**ENVIRONMENT, "args": r'{"\ud800": 1}'}}, "not valid Unicode"),
    ("check_devices", {"backend": {"devices": "gpu"}}, "[backend] devices has 'gpu'"),
    ("check_devices", {"backend": {"devices": "gpu:0,"}}, "[backend] devices has ''"),
    ("check_devices", {"backend": {"devices": "auto,cpu"}}, "[backend] devices has 'auto'"),
    ("check_devices", {"backend": {"devices": "gpu:٣"}}, "[backend] devices has"),
    ("check_devices", {"backend": {"devices": "gpu:00"}}, "[backend] devices has 'gpu:00'"),
    ("check_devices", {"backend": {"devices": "gpu:1,gpu:2,gpu:1"}}, "[backend] devices names 'gpu:1' twice"),
    ("check_group_size", {"training": {"group_size": 1}}, "[training] group_size must be at least 2"),
    (
        "check_ratio_cap",
        {"loss": {"type": "ppo", "ratio_cap": 0.9}},
        "[loss] ratio_cap must be 0 or at least 1, got 0.9.",
    ),
    ("check_custom_rewards", {"reward": {"type": "custom"}}, "[reward] custom_module is empty"),
    ("check_custom_rewards", {"reward": {"terms": [{"type": "custom"}]}}, "[reward] terms[0].custom_module is empty"),
    (
        "check_custom_rewards",
        {"reward": {"type": "custom", "custom_module": "my_rewards.py"}},
        '[reward] custom_module = "my_rewards.py" names a file instead of a module.  Try: "my_rewards"',
    ),
    (
        "check_custom_rewards",
        {"reward": {"terms": [{"type": "custom", "custom_module": "mine/scores.py"}]}},
        'names a file instead of a module.  Try: "scores", and [plugins] search_paths = ["mine"]',
    ),
    (
        "check_custom_rewards",
        {"reward": {"type": "custom", "custom_module": "mine.py:graded"}},
        'names a file instead of a module.  Try: "mine", and custom_function = "graded"',
    ),
    (
        "check_custom_rewards",
        {"reward": {"type": "custom", "custom_module": "mine:graded"}},
        '= "mine:graded" names a function, too.  Try: custom_module = "mine" and custom_function = "graded"',
    ),
    (
        "check_names",
        {"loss": {"type": "my_loss.py:Mine"}},
        "[loss] type 'my_loss.py:Mine' names a file instead of a module. Try: \"my_loss:Mine\"",
    ),
    (
        "check_names",
        {"data": {"source": "rows.jsonl"}},
        '[data] source \'rows.jsonl\' is a file, not a data source. Try: "jsonl", and path = "rows.jsonl"',
    ),
    (
        "check_names",
        {"eval": {"source": "more/rows.jsonl"}},
        "[eval] source 'more/rows.jsonl' is a file, not a data source. Try: \"jsonl\"",
    ),
    (
        "check_names",
        {"environment": {"provider": "two_turns.py"}},
        "[environment] provider 'two_turns.py' names a file instead of a module. Try: \"two_turns:NAME\"",
    ),
    ("check_environment", {"environment": {"provider": "verifiers"}}, "[environment] id is empty"),
    ("check_environment", {"environment": {"max_turns": 0}}, "[environment] max_turns must be -1 or at least 1"),
    ("check_data_source", {"data": {"source": "jsonl"}}, "[data] path is empty"),
    ("check_data_source", {"data": {"source": "hub"}}, "[data] id is empty"),
    ("check_data_source", {"eval": {"source": "jsonl"}}, "[eval] path is empty"),
    (
        "check_dropout",
        {"backend": {"devices": "cpu,cpu"}, "lora": {"dropout": 0.1}},
        "[lora] dropout does not go with several [backend] devices",
    ),
    (
        "check_dropout",
        {"inference": {"engine": "vllm"}, "training": {"async_steps": 1}, "lora": {"dropout": 0.1}},
        "[lora] dropout does not go with [training] async_steps",
    ),
    (
        "check_sampling_device",
        {"inference": {"engine": "mlx"}, "backend": {"devices": "cpu, gpu:1"}},
        '[backend] devices names several, but [inference] engine "mlx" samples on a server',
    ),
    ("check_pass_at_k", {"eval": {"every": 1, "k": 5, "samples": 4}}, "[eval] k is 5, more than the 4 samples"),
    (
        "check_held_out_file",
        {"data": JSONL, "eval": {"every": 5}},
        "[eval] path is empty",
    ),
    (
        "check_held_out_split",
        {"eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems of [data] split = "train".  Try: split = "test"',
    ),
    (
        "check_held_out_split",
        {"eval": {"every": 5, "split": "train", "path": "not_read.jsonl"}},
        '[eval] split = "train" holds the problems of [data] split = "train".',
    ),
    (
        "check_held_out_split",
        {"data": {"split": "test"}, "eval": {"every": 5, "source": "math"}},
        '[eval] split = "test" holds the problems of [data] split = "test".  Try: [data] split = "train"',
    ),
    (
        "check_held_out_split",
        {"data": {"source": "hub", "id": "a/b", "subset": "c"}, "eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems',
    ),
    (
        "check_held_out_split",
        {"data": {"source": "arithmetic", "split": "validation"}, "eval": {"every": 5}},
        '[eval] split = "test" holds the problems of [data] split = "validation".',
    ),
    (
        "check_held_out_split",
        {"data": {"source": "mine.Source", "path": "a"}, "eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems',
    ),
    (
        "check_held_out_split",
        {"data": JSONL, "eval": {"every": 5, "path": "./folder/../a.jsonl"}},
        "[eval] path is the file of [data] path.",
    ),
    (
        "check_paths",
        {"data": {"source": "jsonl", "path": "a\0b"}},
        r"[data] path = 'a\x00b' holds a NUL character, which no path can have.  Try: another path",
    ),
    (
        "check_paths",
        {"plugins": {"search_paths": [".", "x" * 5000]}},
        "xxx...' is longer than a path may be.",
    ),
    (
        "check_batch_size_bounds",
        {"backpressure": {"enabled": True, "min_batch_size": 5, "max_batch_size": 4}},
        "[backpressure] max_batch_size is 4, below min_batch_size = 5",
    ),
    (
        "check_urls",
        {"inference": {"engine": "vllm", "url": "node1:8000"}},
        "[inference] url has 'node1:8000', which is not a URL.  Try: http://node1:8000",
    ),
    *(
        (
            "check_urls",
            {"inference": {"engine": "vllm", "url": f"http://a:1, http://b:{port}"}},
            f"[inference] url has 'http://b:{port}', which has no valid port.",
        )
        for port in ("65536", "0", "eighty")
    ),
    ("check_urls", {"model": {"base_url": "http://"}}, "[model] base_url has 'http://'"),
    (
        "check_urls",
        {"inference": {"engine": "vllm", "url": "http://me:secret@a:1"}},
        "[inference] url holds a password.  Try: put the key into INFERENCE_API_KEY, in .env",
    ),
    *(
        (
            "check_arguments",
            {"environment": {"provider": "builtin", "id": "calculator", "args": args}},
            f"[environment] args holds a secret in {name}, and a run saves its configuration.",
        )
        for args, name in (
            ({"api_key": "supersecret123"}, "api_key"),
            ({"judge": {"url": "https://bob:hunter2secret@host/x"}}, "judge.url"),
            ({"keys": [{"hf_token": "abcdefgh"}]}, "keys.hf_token"),
            ({"other": "sk-0123456789abcdefghij"}, "other"),
            ({"aws_secret_access_key": "abcdefgh", "api-token": "$API_TOKEN"}, "aws_secret_access_key"),
        )
    ),
    (
        "check_launch_device",
        {"inference": {**LAUNCH, "launch_device": "gpu:0"}},
        "[inference] launch_device is 'gpu:0'; it must be auto, cpu or cuda:N.",
    ),
    (
        "check_strategic_grams",
        {"logging": {"strategic_grams": '["wait"'}},
        "[logging] strategic_grams starts like",
    ),
    ("check_strategic_grams", {"logging": {"strategic_grams": f"[{'1' * 5000}]"}}, "[logging] strategic_grams"),
    ("check_strategic_grams", {"logging": {"strategic_grams": "[" * 90_000}}, "[logging] strategic_grams"),
    ("check_templates", {"teaching": {"student_baseline_template": "?"}}, "lacks {question}"),
    (
        "check_templates",
        {"teaching": {"enabled": True, "teacher_adaptive_template": "{question} {approach} {hint}"}, "algorithm": GRPO},
        "has the unknown variable {hint}.  Variables: {question}, {approach}.",
    ),
    (
        "check_teaching_data",
        {
            "teaching": {"enabled": True},
            "algorithm": GRPO,
            "environment": {"provider": "builtin", "id": "guess-number"},
        },
        "[teaching] enabled does not go with an [environment]",
    ),
    (
        "check_student_weights",
        {"teaching": {"enabled": True}, "algorithm": GRPO, "distributed": {"fsdp": True}},
        "[teaching] student_model is empty: the student would be the policy's own weights",
    ),
    (
        "check_teaching_advantage",
        {"teaching": {"enabled": True}, "algorithm": MAXRL},
        '[algorithm] advantage_mode = "maxrl" divides by the mean reward',
    ),
    (
        "check_correct_from",
        {"reward": {"terms": [{"weight": 0.5}, {"type": "math", "weight": 0.3}]}},
        "[reward] correct_from = 1 is more than the terms can add up to (0.8).  Try: correct_from = 0.8",
    ),
    ("check_eval_temperature", {"eval": {"temperature": -0.5}}, "[eval] temperature must be -1 or at least 0"),
    (
        "check_greedy_samples",
        {"eval": {"every": 5, "temperature": 0.0, "samples": 4}},
        "[eval] samples = 4 would repeat the same completion",
    ),
    (
        "check_schedule",
        {"optimizer": {"schedule": "polynomial", "schedule_args": {"lr_end": "a"}}},
        "[optimizer] schedule_args has lr_end = 'a', which is not a number.  Try: a number between 0 and 10",
    ),
    (
        "check_penalties",
        {"reward": {"terms": [{"type": "match"}, {"type": "mine.score", "weight": -0.5}]}},
        "[reward] terms[1].weight = -0.5 can make rewards negative",
    ),
    ("check_conditions", {"campaign": {"conditions": [{}]}}, "[campaign] conditions[0] is empty"),
    ("check_conditions", {"campaign": {"conditions": [{"lrr": 1}]}}, "sets 'lrr'"),
    (
        "check_conditions",
        {"campaign": {"conditions": [{"campaign": {"seeds": [1]}}]}},
        "sets campaign.seeds, which is the same for all conditions",
    ),
    (
        "check_conditions",
        {"campaign": {"conditions": [{"from": "x"}]}},
        "sets resume.from, which is the same for all conditions",
    ),
    ("check_conditions", {"campaign": {"conditions": [GRPO, MAXRL, GRPO]}}, "same condition twice"),
    (
        "check_conditions",
        {"campaign": {"conditions": [GRPO, {"algorithm": GRPO}]}},
        "same condition twice",
    ),
    ("check_campaign", {"campaign": {"share_model": True, "parallel": True}}, "[campaign] share_model steps the runs"),
    (
        "check_conditions",
        {"campaign": {"seeds": [1, 2, 1]}},
        "[campaign] seeds holds the same seed twice",
    ),
]


@pytest.mark.parametrize(("rule", "tables"), GOOD)
def test_a_rule_accepts_a_valid_configuration(rule: str, tables: dict[str, Any]) -> None:
    build_config(tables, {}, rule)


@pytest.mark.parametrize(("rule", "tables", "text"), BAD)
def test_a_rule_reports_an_invalid_configuration(rule: str, tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(tables, {}, rule)
    assert text in str(caught.value)
    assert len(caught.value.issues) == 1


def test_every_rule_is_tested_with_valid_and_invalid_configurations() -> None:
    rules = {rule.__name__ for rule in RULES}
    assert {rule for rule, _ in GOOD} == rules
    assert {rule for rule, _, _ in BAD} == rules


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({"lr": -1}, "[campaign] conditions[1]: [training] lr must be > 0, got -1."),
        ({"lr": "fast"}, '[campaign] conditions[1]: [training] lr must be a number, got "fast".'),
        ({"advantage_mode": "grop"}, "[campaign] conditions[1]: [algorithm] advantage_mode 'grop' is not a known"),
        ({"reward": {"type": "custom"}}, "[campaign] conditions[1]: [reward] custom_module is empty"),
    ],
)
def test_each_condition_must_be_a_valid_run(condition: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"campaign": {"conditions": [GRPO, condition]}}, {}, "campaign.toml")
    assert text in str(caught.value)
    assert len(caught.value.issues) == 1


def test_an_issue_of_the_file_is_not_repeated_for_every_condition() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"training": {"lr": -1}, "campaign": {}}, {}, "campaign.toml")
    assert len(caught.value.issues) == 1


def test_a_condition_names_options_by_key_or_by_table() -> None:
    condition = {"max_steps": 5, "sepa": {"steps": 6}, "model": {"lora_rank": 8}, "backend": "local"}
    assert dict(condition_overrides(condition)) == {
        "training.max_steps": 5,
        "sepa.steps": 6,
        "model.lora_rank": 8,
        "backend.backend": "local",
    }


@pytest.mark.parametrize("path", ["loop", "loop/further"])
def test_a_cycle_of_links_is_rejected(path: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for table, key in (("logging", "log_dir"), ("backend", "adapter_path"), ("model", "model"), ("resume", "from")):
        with pytest.raises(ConfigError, match="is a cycle of symbolic links") as caught:
            build_config({table: {key: str(tmp_path / path)}}, {}, "run.toml")
        assert f"[{table}] {key} = " in str(caught.value)


def test_the_bound_of_an_option_holds_besides_that_of_all_integers() -> None:
    with pytest.raises(ConfigError, match="batch_size must be <= 1000000, got 100000000"):
        build_config({"training": {"batch_size": 100_000_000}}, {}, "run.toml")
    with pytest.raises(ConfigError, match="workers must be <= 1024, got 5000"):
        build_config({"reward": {"workers": 5000}}, {}, "run.toml")
