"""Each rule across options, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.config import build_config
from retrain.config.conditions import condition_overrides
from retrain.config.rules import RELATION_RULES, VALUE_RULES
from retrain.errors import ConfigError

GRPO, MAXRL = {"advantage_mode": "grpo"}, {"advantage_mode": "maxrl"}
LAUNCH = {"engine": "vllm", "launch": True}
JSONL = {"source": "jsonl", "path": "a.jsonl"}
ENVIRONMENT = {"provider": "verifiers", "id": "primeintellect/gsm8k"}

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("weights_are_sharded_one_way", {"distributed": {"fsdp": True}, "kl": {"beta": 0.1, "sync_ref_model": True}}),
    ("weights_are_sharded_one_way", {"distributed": {"zero_stage": 3}, "kl": {"beta": 0.1}}),
    (
        "weights_are_sharded_one_way",
        {"distributed": {"zero_stage": 3, "gather_for_generation": False}, "inference": {"engine": "vllm"}},
    ),
    ("whole_models_are_trained_here", {"model": {"lora_rank": 0}}),
    ("init_kwargs_leave_ours_alone", {"model": {"init_kwargs": {"use_cache": False}}}),
    ("micro_batches_are_cut_one_way", {"memory": {"micro_batches": 4}}),
    ("schedule_is_sound", {"optimizer": {"schedule": "cosine", "schedule_args": {"min_lr_rate": 0.1}}}),
    ("schedule_is_sound", {"optimizer": {"warmup_steps": 0.25}}),
    ("correct_can_be_reached", {"reward": {"terms": [{"weight": 0.7}, {"weight": 0.3}]}}),
    ("correct_can_be_reached", {"reward": {"terms": [{"weight": 0.7}], "correct_from": 0.7}}),
    ("correct_can_be_reached", {"reward": {"terms": [{"type": "mine.score", "weight": 0.1}]}}),
    ("evaluation_temperature_is_one", {"eval": {"temperature": 0.0}}),
    ("evaluation_temperature_is_one", {"eval": {"temperature": -1.0}}),
    ("evaluation_samples_differ", {"eval": {"every": 5, "temperature": 0.0}}),
    ("evaluation_samples_differ", {"eval": {"every": 5, "samples": 4}}),
    ("names_are_known", {"algorithm": {"advantage_mode": "my_package.mine"}}),
    ("names_are_known", {"algorithm": {"transform_mode": "my_package.sub:mine", "algorithm_mode": ""}}),
    ("names_are_known", {"reward": {"terms": [{"type": "match"}, {"type": "mine.score", "weight": 0.5}]}}),
    ("maxrl_has_no_penalties", {"reward": {"terms": [{}, {"type": "math", "weight": -0.5}]}, "algorithm": GRPO}),
    ("maxrl_has_no_penalties", {"reward": {"terms": [{}, {"type": "math", "weight": 0.0}]}, "algorithm": MAXRL}),
    ("values_can_be_written", {"environment": {**ENVIRONMENT, "args": '{"a": [1, {"b": "é"}]}'}}),
    ("devices_follow_the_grammar", {"backend": {"devices": "cpu"}}),
    ("devices_follow_the_grammar", {"backend": {"devices": "auto"}}),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu:0, gpu:1,gpu:17"}}),
    ("groups_can_differ", {"training": {"group_size": 2}}),
    ("ratio_cap_lets_ratios_of_one_pass", {"loss": {"ratio_cap": 0.0}}),
    ("ratio_cap_lets_ratios_of_one_pass", {"loss": {"type": "ppo", "ratio_cap": 1.0}}),
    ("rewards_are_complete", {"reward": {"type": "custom", "custom_module": "mine"}}),
    ("rewards_are_complete", {"reward": {"type": "judge"}}),
    ("judge_address_holds_no_password", {"reward": {"type": "judge", "judge_base_url": "http://a:1/v1/@b"}}),
    (
        "judge_prompt_names_its_variables",
        {"reward": {"type": "judge", "judge_prompt": r"{question} \boxed{x} \frac{a}{b} {response}"}},
    ),
    ("rewards_are_complete", {"reward": {"terms": [{"type": "custom", "custom_module": "mine"}]}}),
    ("rewards_are_complete", {"reward": {"terms": [{"type": "judge"}]}}),
    ("environment_is_complete", {"environment": {**ENVIRONMENT, "max_turns": 1}}),
    ("environment_is_complete", {"environment": {"provider": "mine.Environment"}}),
    ("data_source_is_complete", {"data": {"source": "jsonl", "path": "problems.jsonl"}}),
    ("data_source_is_complete", {"data": {"source": "mine.Source", "path": "problems.txt"}}),
    ("data_source_is_complete", {"data": {"source": "hub", "id": "openai/gsm8k"}}),
    ("data_source_is_complete", {"data": JSONL, "eval": {"path": "b.jsonl"}}),
    ("data_source_is_complete", {"data": {"source": "mine.Source"}, "eval": {"path": "b.txt"}}),
    ("data_source_is_complete", {"data": {"source": "math"}, "eval": {"source": "jsonl", "path": "b.jsonl"}}),
    ("data_source_is_complete", {"data": JSONL}),
    ("split_mode_has_no_dropout", {"backend": {"devices": "gpu:0,gpu:1"}}),
    ("split_mode_has_no_dropout", {"lora": {"dropout": 0.1}}),
    ("samplers_are_where_they_can_be", {"inference": {"engine": "vllm"}, "training": {"async_steps": 1}}),
    ("samplers_are_where_they_can_be", {"backend": {"devices": "gpu:0,gpu:1"}, "training": {"async_steps": 1}}),
    ("samplers_are_where_they_can_be", {"backend": {"backend": "tinker"}, "training": {"async_steps": 1}}),
    ("evaluation_has_enough_samples", {"eval": {"k": 4, "samples": 4}}),
    (
        "evaluation_has_held_out_problems",
        {"data": JSONL, "eval": {"every": 5, "source": "jsonl", "path": "b.jsonl"}},
    ),
    ("evaluation_has_held_out_problems", {"data": JSONL, "eval": {"every": 5, "path": "b.jsonl"}}),
    ("evaluation_is_not_on_training_problems", {"data": {"split": "test"}}),
    ("evaluation_is_not_on_training_problems", {"data": {"split": "test"}, "eval": {"every": 5, "split": "train"}}),
    ("evaluation_is_not_on_training_problems", {"eval": {"every": 5, "source": "gsm8k", "split": "train"}}),
    (
        "evaluation_is_not_on_training_problems",
        {"data": {"source": "mine.Source", "path": "a"}, "eval": {"every": 5, "split": "train", "path": "b"}},
    ),
    ("evaluation_is_not_on_training_problems", {"data": JSONL, "eval": {"every": 5, "path": "../a.jsonl"}}),
    ("evaluation_is_not_on_training_problems", {"data": JSONL, "eval": {"path": "a.jsonl"}}),
    ("backpressure_bounds_are_ordered", {"backpressure": {"enabled": True, "min_batch_size": 4, "max_batch_size": 4}}),
    ("paths_can_be_used", {"logging": {"log_dir": "~/not there/yet"}, "data": {"path": "", "source": "math"}}),
    ("urls_are_urls", {"inference": {"engine": "vllm", "url": "http://localhost:8000, https://a.example/v1"}}),
    ("launch_device_follows_the_grammar", {"inference": {**LAUNCH, "launch_device": "cuda:1"}}),
    ("strategic_grams_can_be_read", {"logging": {"strategic_grams": '["wait", "let me check"]'}}),
    ("strategic_grams_can_be_read", {"logging": {"strategic_grams": "wait, let me check"}}),
    (
        "templates_name_their_variables",
        {"teaching": {"enabled": True, "teacher_adaptive_template": "{question} {approach}"}, "algorithm": GRPO},
    ),
    (
        "templates_name_their_variables",
        {
            "teaching": {"enabled": True, "student_baseline_template": "{question} \\boxed{answer} \\frac{a}{b}"},
            "algorithm": GRPO,
        },
    ),
    ("teaching_is_of_one_answer", {"teaching": {"enabled": True}, "algorithm": GRPO}),
    ("teaching_has_an_advantage_for_losses", {"teaching": {"enabled": True}, "algorithm": GRPO}),
    (
        "students_have_whole_weights",
        {"teaching": {"enabled": True, "student_model": "a/b"}, "algorithm": GRPO, "distributed": {"fsdp": True}},
    ),
    (
        "students_have_whole_weights",
        {"teaching": {"enabled": True}, "algorithm": GRPO, "distributed": {"zero_stage": 1}},
    ),
    ("teaching_has_an_advantage_for_losses", {"teaching": {"enabled": True}, "algorithm": {"algorithm_mode": "a.b"}}),
    ("teaching_has_an_advantage_for_losses", {"teaching": {"enabled": True, "degradation_penalty_multiplier": 0.0}}),
    ("teaching_has_an_advantage_for_losses", {"teaching": {"enabled": True}, "campaign": {"conditions": [GRPO]}}),
    ("conditions_override_real_options", {"campaign": {"conditions": [GRPO, {"sepa": {"steps": 5}, "lr": 1e-3}]}}),
    ("conditions_override_real_options", {"campaign": {"conditions": [{"model": {"lora_rank": 8}}, {"model": "a/b"}]}}),
]

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("weights_are_sharded_one_way", {"distributed": {"fsdp": True, "zero_stage": 1}}, "both shard"),
    ("weights_are_sharded_one_way", {"distributed": {"fsdp": True}, "campaign": {}}, "each run of a [campaign] is one"),
    (
        "weights_are_sharded_one_way",
        {"distributed": {"fsdp": True, "gather_for_generation": False}},
        "= false leaves no rank with whole weights",
    ),
    (
        "weights_are_sharded_one_way",
        {"distributed": {"zero_stage": 3}, "kl": {"beta": 0.1, "sync_ref_model": True}},
        "[kl] beta with [distributed] zero_stage = 3 has the base model as its reference",
    ),
    (
        "weights_are_sharded_one_way",
        {"distributed": {"zero_stage": 3}, "kl": {"beta": 0.1}, "model": {"lora_rank": 0}},
        "Try: [distributed] fsdp = true",
    ),
    (
        "whole_models_are_trained_here",
        {"model": {"lora_rank": 0}, "inference": {"engine": "vllm"}},
        '[model] lora_rank = 0 trains the whole model, and the engine "vllm" is given adapters.',
    ),
    (
        "whole_models_are_trained_here",
        {"model": {"lora_rank": 0}, "backend": {"backend": "tinker"}},
        "tinker trains adapters",
    ),
    ("init_kwargs_leave_ours_alone", {"model": {"init_kwargs": {"torch_dtype": "float16"}}}, "Try: [model] dtype"),
    ("init_kwargs_leave_ours_alone", {"model": {"init_kwargs": {"load_in_4bit": True}}}, "Quantised weights"),
    (
        "micro_batches_are_cut_one_way",
        {"memory": {"micro_batches": 4, "micro_batch_rows": 2}},
        "[memory] micro_batches and micro_batch_rows cut a step in two ways.",
    ),
    ("schedule_is_sound", {"optimizer": {"warmup_steps": 2.5}}, "must be a whole number of steps"),
    ("schedule_is_sound", {"optimizer": {"schedule_args": {"powr": 2}}}, "'constant' does not take.  It takes none."),
    (
        "schedule_is_sound",
        {"optimizer": {"schedule": "cosine", "schedule_args": {"min_lr_rate": 2}}},
        "min_lr_rate = 2, which must be between 0 and 1",
    ),
    (
        "schedule_is_sound",
        {"optimizer": {"schedule": "inverse_sqrt", "schedule_args": {"timescale": True}}},
        "timescale = True, which is not a number",
    ),
    (
        "schedule_is_sound",
        {"optimizer": {"schedule": "polynomial", "schedule_args": {"lr_end": 0.5}}},
        "lr_end that is not below [training] lr",
    ),
    (
        "judge_address_holds_no_password",
        {"reward": {"type": "judge", "judge_base_url": "http://me:word@a/v1"}},
        "[reward] judge_base_url holds a password",
    ),
    ("judge_address_holds_no_password", {"reward": {"type": "judge", "judge_base_url": "a:1"}}, "'a:1', not a URL"),
    (
        "judge_address_holds_no_password",
        {"reward": {"type": "judge", "judge_base_url": "http://a/v1?api_key=word"}},
        "[reward] judge_base_url holds a query (?...), which an address of a server cannot have.  Try: put",
    ),
    (
        "judge_address_holds_no_password",
        {"reward": {"type": "judge", "judge_base_url": "a/v1?api_key=word"}},
        "is 'a/v1', not a URL",
    ),
    ("judge_prompt_names_its_variables", {"reward": {"type": "judge", "judge_prompt": "ok?"}}, "lacks {response}"),
    (
        "judge_prompt_names_its_variables",
        {"reward": {"type": "judge", "judge_prompt": "{response} {answer}"}},
        "has {answer}, which it does not know.  It knows",
    ),
    ("names_are_known", {"inference": {"engine": "vlm"}}, "[inference] engine 'vlm' is not a known inference engine"),
    ("names_are_known", {"backend": {"backend": ""}}, "[backend] backend '' is not a known backend"),
    (
        "names_are_known",
        {"reward": {"terms": [{"type": "mtch"}]}},
        "[reward] terms[0].type 'mtch' is not a known reward",
    ),
    ("values_can_be_written", {"environment": {**ENVIRONMENT, "args": '{"a": null}'}}, "[environment] args holds null"),
    ("values_can_be_written", {"environment": {**ENVIRONMENT, "args": r'{"\ud800": 1}'}}, "not valid Unicode"),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu"}}, "[backend] devices has 'gpu'"),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu:0,"}}, "[backend] devices has ''"),
    ("devices_follow_the_grammar", {"backend": {"devices": "auto,cpu"}}, "[backend] devices has 'auto'"),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu:٣"}}, "[backend] devices has"),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu:00"}}, "[backend] devices has 'gpu:00'"),
    ("devices_follow_the_grammar", {"backend": {"devices": "gpu:1,gpu:1"}}, "[backend] devices names 'gpu:1' twice"),
    ("groups_can_differ", {"training": {"group_size": 1}}, "[training] group_size must be at least 2"),
    (
        "ratio_cap_lets_ratios_of_one_pass",
        {"loss": {"type": "ppo", "ratio_cap": 0.9}},
        "[loss] ratio_cap must be 0 or at least 1, got 0.9.",
    ),
    ("rewards_are_complete", {"reward": {"type": "custom"}}, "[reward] custom_module is empty"),
    ("rewards_are_complete", {"reward": {"terms": [{"type": "custom"}]}}, "[reward] terms[0].custom_module is empty"),
    ("environment_is_complete", {"environment": {"provider": "verifiers"}}, "[environment] id is empty"),
    ("environment_is_complete", {"environment": {"max_turns": 0}}, "[environment] max_turns must be -1 or at least 1"),
    ("data_source_is_complete", {"data": {"source": "jsonl"}}, "[data] path is empty"),
    ("data_source_is_complete", {"data": {"source": "hub"}}, "[data] id is empty"),
    ("data_source_is_complete", {"eval": {"source": "jsonl"}}, "[eval] path is empty"),
    (
        "split_mode_has_no_dropout",
        {"backend": {"devices": "cpu,cpu"}, "lora": {"dropout": 0.1}},
        "[lora] dropout does not go with several [backend] devices",
    ),
    (
        "split_mode_has_no_dropout",
        {"inference": {"engine": "vllm"}, "training": {"async_steps": 1}, "lora": {"dropout": 0.1}},
        "[lora] dropout does not go with [training] async_steps",
    ),
    (
        "samplers_are_where_they_can_be",
        {"inference": {"engine": "mlx"}, "backend": {"devices": "cpu, gpu:1"}},
        '[backend] devices names several, but [inference] engine "mlx" samples on a server',
    ),
    ("evaluation_has_enough_samples", {"eval": {"k": 5, "samples": 4}}, "[eval] k is 5, more than the 4 samples"),
    (
        "evaluation_has_held_out_problems",
        {"data": JSONL, "eval": {"every": 5}},
        "[eval] path is empty",
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems of [data] split = "train".  Try: split = "test"',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"eval": {"every": 5, "split": "train", "path": "not_read.jsonl"}},
        '[eval] split = "train" holds the problems of [data] split = "train".',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"data": {"split": "test"}, "eval": {"every": 5, "source": "math"}},
        '[eval] split = "test" holds the problems of [data] split = "test".  Try: [data] split = "train"',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"data": {"source": "hub", "id": "a/b", "subset": "c"}, "eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"data": {"source": "arithmetic", "split": "validation"}, "eval": {"every": 5}},
        '[eval] split = "test" holds the problems of [data] split = "validation".',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"data": {"source": "mine.Source", "path": "a"}, "eval": {"every": 5, "split": "train"}},
        '[eval] split = "train" holds the problems',
    ),
    (
        "evaluation_is_not_on_training_problems",
        {"data": JSONL, "eval": {"every": 5, "path": "./folder/../a.jsonl"}},
        "[eval] path is the file of [data] path.",
    ),
    (
        "paths_can_be_used",
        {"data": {"source": "jsonl", "path": "a\0b"}},
        r"[data] path = 'a\x00b' holds a NUL character, which no path can have.  Try: another path",
    ),
    (
        "paths_can_be_used",
        {"plugins": {"search_paths": [".", "x" * 5000]}},
        "xxx...' is longer than a path may be.",
    ),
    (
        "backpressure_bounds_are_ordered",
        {"backpressure": {"enabled": True, "min_batch_size": 5, "max_batch_size": 4}},
        "[backpressure] max_batch_size is 4, below min_batch_size = 5",
    ),
    (
        "urls_are_urls",
        {"inference": {"engine": "vllm", "url": "node1:8000"}},
        "[inference] url has 'node1:8000', which is not a URL.  Try: http://node1:8000",
    ),
    *(
        (
            "urls_are_urls",
            {"inference": {"engine": "vllm", "url": f"http://a:1, http://b:{port}"}},
            f"[inference] url has 'http://b:{port}', and there is no such port.",
        )
        for port in ("65536", "0", "eighty")
    ),
    ("urls_are_urls", {"model": {"base_url": "http://"}}, "[model] base_url has 'http://'"),
    (
        "urls_are_urls",
        {"inference": {"engine": "vllm", "url": "http://me:secret@a:1"}},
        "[inference] url holds a password.  Try: put the key into INFERENCE_API_KEY, in .env",
    ),
    (
        "launch_device_follows_the_grammar",
        {"inference": {**LAUNCH, "launch_device": "gpu:0"}},
        "[inference] launch_device is 'gpu:0'; it is auto, cpu or cuda:N.",
    ),
    (
        "strategic_grams_can_be_read",
        {"logging": {"strategic_grams": '["wait"'}},
        "[logging] strategic_grams starts like",
    ),
    ("strategic_grams_can_be_read", {"logging": {"strategic_grams": f"[{'1' * 5000}]"}}, "[logging] strategic_grams"),
    ("strategic_grams_can_be_read", {"logging": {"strategic_grams": "[" * 90_000}}, "[logging] strategic_grams"),
    ("templates_name_their_variables", {"teaching": {"student_baseline_template": "?"}}, "lacks {question}"),
    (
        "templates_name_their_variables",
        {"teaching": {"enabled": True, "teacher_adaptive_template": "{question} {approach} {hint}"}, "algorithm": GRPO},
        "has {hint}, which it does not know.  It knows {question} and {approach}.",
    ),
    (
        "teaching_is_of_one_answer",
        {
            "teaching": {"enabled": True},
            "algorithm": GRPO,
            "environment": {"provider": "builtin", "id": "guess-number"},
        },
        "[teaching] enabled does not go with an [environment]",
    ),
    *(
        (
            "students_have_whole_weights",
            {"teaching": {"enabled": True}, "algorithm": GRPO, "distributed": spread},
            "[teaching] student_model is empty: the student would be the policy's own weights",
        )
        for spread in ({"fsdp": True}, {"zero_stage": 3})
    ),
    (
        "teaching_has_an_advantage_for_losses",
        {"teaching": {"enabled": True}, "algorithm": MAXRL},
        '[algorithm] advantage_mode = "maxrl" divides by the mean reward',
    ),
    (
        "correct_can_be_reached",
        {"reward": {"terms": [{"weight": 0.5}, {"type": "math", "weight": 0.3}]}},
        "[reward] correct_from = 1 is more than the terms can add up to (0.8).  Try: correct_from = 0.8",
    ),
    ("evaluation_temperature_is_one", {"eval": {"temperature": -0.5}}, "[eval] temperature must be -1 or at least 0"),
    (
        "evaluation_samples_differ",
        {"eval": {"every": 5, "temperature": 0.0, "samples": 4}},
        "[eval] samples = 4 would be so many times the same completion",
    ),
    (
        "schedule_is_sound",
        {"optimizer": {"schedule": "polynomial", "schedule_args": {"lr_end": "a"}}},
        "[optimizer] schedule_args has lr_end = 'a', which is not a number.",
    ),
    (
        "maxrl_has_no_penalties",
        {"reward": {"terms": [{"type": "match"}, {"type": "mine.score", "weight": -0.5}]}},
        "[reward] terms[1].weight = -0.5 makes rewards negative",
    ),
    ("conditions_override_real_options", {"campaign": {"conditions": [{}]}}, "[campaign] conditions[0] is empty"),
    ("conditions_override_real_options", {"campaign": {"conditions": [{"lrr": 1}]}}, "sets 'lrr'"),
    (
        "conditions_override_real_options",
        {"campaign": {"conditions": [{"campaign": {"seeds": [1]}}]}},
        "'campaign.seeds'",
    ),
    ("conditions_override_real_options", {"campaign": {"conditions": [{"from": "x"}]}}, "'resume.from'"),
    ("conditions_override_real_options", {"campaign": {"conditions": [GRPO, MAXRL, GRPO]}}, "same condition twice"),
    (
        "conditions_override_real_options",
        {"campaign": {"conditions": [GRPO, {"algorithm": GRPO}]}},
        "same condition twice",
    ),
    (
        "conditions_override_real_options",
        {"campaign": {"seeds": [1, 2, 1]}},
        "[campaign] seeds holds the same seed twice",
    ),
]


@pytest.mark.parametrize(("rule", "tables"), GOOD)
def test_a_rule_lets_a_sound_configuration_pass(rule: str, tables: dict[str, Any]) -> None:
    build_config(tables, {}, rule)


@pytest.mark.parametrize(("rule", "tables", "text"), BAD)
def test_a_rule_names_what_it_refuses(rule: str, tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(tables, {}, rule)
    assert text in str(caught.value)
    assert len(caught.value.issues) == 1


def test_every_rule_is_tried_both_ways() -> None:
    rules = {rule.__name__ for rule in (*VALUE_RULES, *RELATION_RULES)}
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


def test_a_problem_of_the_file_is_not_repeated_for_every_condition() -> None:
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
def test_a_path_that_leads_round_in_a_circle_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for table, key in (("logging", "log_dir"), ("backend", "adapter_path"), ("model", "model"), ("resume", "from")):
        with pytest.raises(ConfigError, match="leads round in a circle of symbolic links") as caught:
            build_config({table: {key: str(tmp_path / path)}}, {}, "run.toml")
        assert f"[{table}] {key} = " in str(caught.value)


def test_an_options_own_bound_holds_beside_that_of_all_counts() -> None:
    with pytest.raises(ConfigError, match="batch_size must be <= 1000000, got 100000000"):
        build_config({"training": {"batch_size": 100_000_000}}, {}, "run.toml")
    with pytest.raises(ConfigError, match="workers must be <= 1024, got 5000"):
        build_config({"reward": {"workers": 5000}}, {}, "run.toml")
