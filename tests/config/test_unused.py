"""Options that are set and not used: a note each, in runs and campaigns, and errors in strict mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.config import build_config, dump_config, find_notes, load_config
from retrain.config.declare import IGNORED
from retrain.config.load import build_condition
from retrain.config.options import all_options, options_by_path
from retrain.config.reasons import never
from retrain.config.toml import parse_toml
from retrain.errors import ConfigError

GRPO = {"advantage_mode": "grpo"}
ENVIRONMENT = {"provider": "verifiers", "id": "a/b"}
JSONL = {"source": "jsonl", "path": "a.jsonl"}
SEMANTIC = {"planning": {"detector": "semantic"}}
TINKER = {"backend": {"backend": "tinker"}}
VLLM = {"inference": {"engine": "vllm"}}
TEMPLATES = {
    "teacher_adaptive_template": "{question} {approach}",
    "student_with_teaching_template": "{question}{teaching}",
}


UNUSED = [
    option.path
    for option in all_options()
    if option.facets.unused not in (None, never) or option.facets.on_tinker == IGNORED
]


def notes_of(tables: dict[str, Any]) -> list[str]:
    return [str(note) for note in find_notes(build_config(tables, {}, "run.toml"))]


# The option, a value, why it is not used by default, and tables with which it is used.
ALONE: list[tuple[str, Any, str, list[dict[str, Any]]]] = [
    ("backend.max_concurrent", 8, "[backend] backend is local", [TINKER]),
    ("backend.throttle_dir", "/tmp/t", "[backend] backend is local", [{"backend": {"backend": "mine.build"}}]),
    ("model.base_url", "http://a:1", "[backend] backend is local", [TINKER]),
    (
        "training.async_steps",
        1,
        "sampling and training share one device",
        [VLLM, {"backend": {"devices": "gpu:0,gpu:1"}}, TINKER],
    ),
    *(
        (
            f"inference.{key}",
            value,
            "[inference] engine is pytorch, and only vLLM servers can be started",
            [{"inference": {"engine": "vllm", "launch": True}}],
        )
        for key, value in {
            "launch": True,
            "launch_device": "cpu",
            "gpu_memory_utilization": 0.5,
            "launch_dtype": "float16",
            "max_model_len": 512,
        }.items()
    ),
    *(
        (f"inference.{key}", value, "[inference] engine is pytorch", [VLLM, {"inference": {"engine": "mine.Engine"}}])
        for key, value in (("url", "http://a:1"), ("adapter_dir", "/shared"), ("timeout_s", 5.0), ("wait_s", 5.0))
    ),
    ("kl.sync_ref_model", True, "[kl] beta is 0.0", [{"kl": {"beta": 0.1}}]),
    ("kl.ref_model_mixup_alpha", 0.5, "[kl] beta is 0.0", [{"kl": {"beta": 0.1, "sync_ref_model": True}}]),
    ("kl.ref_model_sync_steps", 5, "[kl] beta is 0.0", [{"kl": {"beta": 0.1, "sync_ref_model": True}}]),
    (
        "memory.offload_untrained_models",
        True,
        "there is no reference ([kl] beta) and no student of its own",
        [
            {"kl": {"beta": 0.1}},
            {"teaching": {"enabled": True, "student_model": "a/b"}},
            {"teaching": {"enabled": True}, "model": {"lora_rank": 0}},
        ],
    ),
    (
        "algorithm.advantage_params",
        {"a": 1},
        "[algorithm] advantage_mode is maxrl",
        [{"algorithm": {"advantage_mode": "mine.advantage"}}],
    ),
    (
        "algorithm.transform_params",
        {"a": 1},
        "[algorithm] transform_mode is gtpo_sepa",
        [{"algorithm": {"transform_mode": "mine.make"}}, {"algorithm": {"algorithm_mode": "mine.whole"}}],
    ),
    ("planning.model", "mine", "[planning] detector is regex", [SEMANTIC, {"planning": {"detector": "a.B"}}]),
    ("planning.threshold", 0.1, "[planning] detector is regex", [SEMANTIC, {"planning": {"detector": "a.B"}}]),
    ("data.path", "a.jsonl", "[data] source is math", [{"data": {"source": "jsonl"}}, {"data": {"source": "a.B"}}]),
    ("data.id", "a/b", "[data] source is math", [{"data": {"source": "hub"}}, {"data": {"source": "a.B"}}]),
    *(
        (
            f"data.{key}",
            "text",
            "[data] source is math",
            [
                {"data": JSONL},
                {"data": {"source": "hub", "id": "a/b"}},
                {"data": {"source": "mine.Source"}},
                {"eval": {"every": 5, "source": "jsonl", "path": "a.jsonl"}},
            ],
        )
        for key in ("prompt_field", "answer_field")
    ),
    (
        "eval.path",
        "b.jsonl",
        "[data] source is math, which reads no file",
        [{"data": JSONL}, {"eval": {"source": "jsonl"}}, {"data": {"source": "mine.Source"}}],
    ),
    *(
        (f"environment.{key}", value, "[environment] provider is empty", [{"environment": ENVIRONMENT}])
        for key, value in (("id", "c/d"), ("args", {"n": 1}), ("max_turns", 3), ("auto_install", True))
    ),
    ("environment.timeout_s", 5.0, "[environment] provider is empty", [{"environment": ENVIRONMENT}]),
    *(
        (
            f"reward.judge_{key}",
            value,
            "[reward] type is match",
            [{"reward": {"type": "judge"}}, {"reward": {"terms": [{}, {"type": "judge"}]}}],
        )
        for key, value in (
            ("model", "gpt"),
            ("base_url", "http://a:1"),
            ("prompt", "{response}"),
            ("concurrency", 2),
            ("timeout_s", 1.0),
            ("cache", ""),
            ("prompt_price", 0.1),
            ("completion_price", 0.1),
        )
    ),
    ("reward.custom_module", "mine", "[reward] type is match", [{"reward": {"type": "custom"}}]),
    (
        "reward.custom_function",
        "grade",
        "[reward] type is match",
        [{"reward": {"type": "custom", "custom_module": "mine"}}],
    ),
    *(
        (
            option.path,
            TEMPLATES.get(option.key, "a {question}" if option.type_name == "str" else 7),
            "[teaching] enabled is false",
            [{"teaching": {"enabled": True}}],
        )
        for option in all_options()
        if option.section == "teaching" and option.key != "enabled"
    ),
    (
        "distributed.gather_for_generation",
        False,
        "[distributed] fsdp is false",
        [{"distributed": {"fsdp": True}, **VLLM}],
    ),
    *(
        (
            option.path,
            0.25 if option.type_name == "float" else 5,
            "[backpressure] enabled is false",
            [{"backpressure": {"enabled": True}}],
        )
        for option in all_options()
        if option.section == "backpressure" and option.key != "enabled"
    ),
]

# Options that other options make unused: the tables, the note, and tables without a note.
WITH_OTHERS: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        {"algorithm": {"algorithm_mode": "a.b", "advantage_mode": "grpo"}},
        "[algorithm] advantage_mode is not used: [algorithm] algorithm_mode is a.b",
        [
            {"algorithm": {"advantage_mode": "grpo"}},
            {"algorithm": {"algorithm_mode": "a.b"}, "teaching": {"enabled": True}},
        ],
    ),
    (
        {"algorithm": {"algorithm_mode": "a.b", "transform_mode": "none"}},
        "[algorithm] transform_mode is not used: [algorithm] algorithm_mode is a.b",
        [{"algorithm": {"transform_mode": "none"}}],
    ),
    (
        {"reward": {"type": "judge", "terms": [{"type": "math"}]}},
        "[reward] type is not used: [reward] terms replace it",
        [{"reward": {"terms": [{"type": "math"}]}}],
    ),
    (
        {"training": {"epochs": 2.0, "max_steps": 3}},
        "[training] max_steps is not used: [training] epochs is 2.0",
        [{"training": {"max_steps": 3}}, {"training": {"epochs": 2.0}}],
    ),
    (
        {"environment": ENVIRONMENT, "data": {"source": "arithmetic"}},
        f"[data] source is not used: [environment] provider is {ENVIRONMENT['provider']}",
        [{"environment": ENVIRONMENT}, {"data": {"source": "arithmetic"}}],
    ),
    (
        {"environment": ENVIRONMENT, "data": {"system_prompt": "Think."}},
        f"[data] system_prompt is not used: [environment] provider is {ENVIRONMENT['provider']}",
        [{"data": {"system_prompt": "Think."}}, {"data": {"system_prompt": "Think."}, "teaching": {"enabled": True}}],
    ),
    *(
        (
            tables | {"reward": tables.get("reward", {}) | {key: value}},
            f"[reward] {key} is not used: {reason}",
            [{"reward": {key: value}}, {"reward": {key: value, "terms": [{"type": "judge"}, {"type": "math"}]}}],
        )
        for key, value in (("timeout_s", 9.0), ("workers", 3), ("memory_mb", 100), ("pass_env", ["A"]))
        for tables, reason in (
            ({"environment": ENVIRONMENT}, f"[environment] provider is {ENVIRONMENT['provider']}"),
            ({"reward": {"type": "judge"}}, "[reward] type is judge"),
            ({"reward": {"terms": [{"type": "judge"}]}}, "all of [reward] terms are judges"),
        )
    ),
    (
        {"environment": ENVIRONMENT, "reward": {"terms": [{"type": "math"}]}},
        f"[reward] terms is not used: [environment] provider is {ENVIRONMENT['provider']}",
        [{"environment": ENVIRONMENT, "reward": {"correct_from": 0.5}}],
    ),
    (
        {"loss": {"type": "cispo", "ratio_cap": 3.0}},
        "[loss] ratio_cap is not used: [loss] type is cispo",
        [{"loss": {"type": "cispo", "ratio_cap": 0.0}}, {"loss": {"type": "ppo", "ratio_cap": 3.0}}],
    ),
    (
        {"kl": {"beta": 0.1, "ref_model_sync_steps": 5}},
        "[kl] ref_model_sync_steps is not used: [kl] sync_ref_model is false",
        [],
    ),
    (
        {**SEMANTIC, "logging": {"strategic_grams": "wait"}},
        "[logging] strategic_grams is not used: [planning] detector is semantic",
        [
            {"logging": {"strategic_grams": "wait"}},
            {"planning": {"detector": "a.B"}, "logging": {"strategic_grams": "wait"}},
        ],
    ),
    (
        {"data": {"source": "arithmetic", "subset": "geometry"}},
        "[data] subset is not used: [data] source is arithmetic",
        [
            {"data": {"source": source, "id": "a/b" if source == "hub" else "", "subset": "geometry"}}
            for source in ("math", "gsm8k", "hub", "mine.Source")
        ]
        + [{"data": {**JSONL, "subset": "geometry"}, "eval": {"every": 5, "source": "math"}}],
    ),
    ({"data": {**JSONL, "split": "dev"}}, "[data] split is not used: [data] source is jsonl", [{"data": {}}]),
    (
        {"data": JSONL, "eval": {"every": 5, "path": "b.jsonl", "split": "dev"}},
        "[eval] split is not used: a jsonl file has no splits",
        [{"data": JSONL, "eval": {"path": "b.jsonl", "split": "dev"}}, {"eval": {"every": 5, "split": "dev"}}],
    ),
    (
        {"data": {"prompt_field": "x"}, "eval": {"source": "jsonl", "path": "b.jsonl"}},
        "[data] prompt_field is not used: [data] source is math",
        [],
    ),
    (
        {"data": JSONL, "eval": {"source": "math", "path": "b.jsonl"}},
        "[eval] path is not used: [eval] source is math, which reads no file",
        [],
    ),
    (
        {"environment": ENVIRONMENT, "eval": {"every": 5, "source": "gsm8k"}},
        "[eval] source is not used: an environment brings its own held-out problems",
        [{"environment": ENVIRONMENT, "eval": {"every": 5}}],
    ),
    (
        {"reward": {"custom_module": "mine", "terms": [{"type": "custom", "custom_module": "mine"}]}},
        "[reward] custom_module is not used: [reward] terms replace it",
        [{"reward": {"terms": [{"type": "custom", "custom_module": "mine", "custom_function": "grade"}]}}],
    ),
    (
        {"reward": {"judge_model": "gpt", "terms": [{}]}},
        "[reward] judge_model is not used: none of [reward] terms is a judge",
        [],
    ),
    (
        {"reward": {"think_boxes": False, "type": "judge"}},
        "[reward] think_boxes is not used: [reward] type is judge",
        [{"reward": {"think_boxes": False}}, {"reward": {"think_boxes": False, "terms": [{"type": "math"}]}}],
    ),
    (
        {"reward": {"terms": [{}, {"type": "match", "custom_function": "grade"}]}},
        "[reward] terms[1].custom_function is not used: its type is match",
        [],
    ),
    (
        {"reward": {"terms": [{"custom_module": "mine"}]}},
        "[reward] terms[0].custom_module is not used: its type is match",
        [],
    ),
    ({**TINKER, "distributed": {"fsdp": True}}, "[distributed] fsdp is not used: [backend] backend is tinker", []),
    *(
        ({"model": {"lora_rank": 0}, "lora": {key: value}}, f"[lora] {key} is not used: [model] lora_rank is 0", [])
        for key, value in (("alpha", 8), ("dropout", 0.1), ("target_modules", "q_proj"))
    ),
    (
        {"data": {"source": "gsm8k", "remove_unused_columns": True}},
        "[data] remove_unused_columns is not used: [data] source is gsm8k",
        [{"data": {"remove_unused_columns": True}}, {"data": {**JSONL, "remove_unused_columns": True}}],
    ),
    (
        {"inference": {"engine": "vllm", "launch": True, "url": "http://a:1"}},
        "[inference] launch is not used: [inference] url names a server",
        [],
    ),
    (
        {"inference": {"engine": "vllm", "max_model_len": 512}},
        "[inference] max_model_len is not used: [inference] launch is false",
        [],
    ),
    (
        {"inference": {"engine": "vllm", "merge_adapter": "never"}},
        "[inference] merge_adapter is not used: [inference] engine is vllm",
        [{"inference": {"merge_adapter": "never"}}],
    ),
    (
        {"inference": {"engine": "vllm", "kv_cache_dtype": "fp8"}},
        "[inference] kv_cache_dtype is not used: [inference] engine is vllm; start its server with --kv-cache-dtype",
        [{"inference": {"kv_cache_dtype": "fp8"}}, {"inference": {"engine": "mine.Engine", "kv_cache_dtype": "fp8"}}],
    ),
    (
        {"inference": {"engine": "mlx", "attention_kernel": "flash"}},
        "[inference] attention_kernel is not used: [inference] engine is mlx",
        [],
    ),
    (
        {"inference": {"engine": "vllm", "launch": True, "dtype": "bf16"}},
        "[inference] dtype is not used: the server that is started takes launch_dtype",
        [],
    ),
    (
        {"inference": {"engine": "sglang", "prefix_caching": False}},
        "[inference] prefix_caching is not used: [inference] engine is sglang; start its server with "
        "--disable-radix-cache",
        [],
    ),
    *(
        ({"backend": TINKER["backend"], **tables}, f"{where} is not used: [backend] backend is tinker", [])
        for where, tables in (
            ("[inference] engine", VLLM),
            ("[inference] launch", {"inference": {"launch": True}}),
            ("[backend] devices", {"backend": {**TINKER["backend"], "devices": "cpu"}}),
            ("[backend] adapter_path", {"backend": {**TINKER["backend"], "adapter_path": "adapter"}}),
            ("[model] dtype", {"model": {"dtype": "fp32"}}),
            *(
                (f"[memory] {key}", {"memory": {key: value}})
                for key, value in (
                    ("micro_batch_tokens", 512),
                    ("micro_batches", 2),
                    ("micro_batch_rows", 2),
                    ("gradient_checkpointing", True),
                    ("offload_untrained_models", True),
                )
            ),
        )
    ),
    (
        {**TINKER, "training": {"deterministic": True}},
        "[training] deterministic is not used: [backend] backend is tinker",
        [
            {"training": {"deterministic": True}},
            {
                **TINKER,
                "environment": {"provider": "builtin", "id": "guess-number"},
                "training": {"deterministic": True},
            },
        ],
    ),
    (
        {"optimizer": {"schedule_args": {"min_lr_rate": 0.1}}},
        "[optimizer] schedule_args.min_lr_rate is not used: [optimizer] schedule is constant",
        [{"optimizer": {"schedule": "cosine", "schedule_args": {"min_lr_rate": 0.1}}}],
    ),
    (
        {"squeeze": {"min_variance_retention": 0.9}},
        "[squeeze] min_variance_retention is not used: [squeeze] adapter_path is empty",
        [{"squeeze": {"adapter_path": "a", "min_variance_retention": 0.9}}, {"squeeze": {}}],
    ),
    *(
        ({"squeeze": {key: value}}, f"[squeeze] {key} is not used: [squeeze] adapter_path is empty", [])
        for key, value in (("output_path", "b"), ("target_ranks", [4]), ("device", "cuda"), ("source_rank", 8))
    ),
    (
        {"squeeze": {"adapter_path": "a", "compress_to": 4}},
        "[squeeze] compress_to is not used: [squeeze] output_path is empty",
        [{"squeeze": {"adapter_path": "a", "compress_to": 4, "output_path": "b"}}],
    ),
    (
        {"campaign": {"gpus_per_run": 0.5}},
        "[campaign] gpus_per_run is not used: [campaign] executor is local",
        [{"campaign": {"gpus_per_run": 0.5, "executor": "ray"}}],
    ),
    *(
        ({"campaign": {}, section: {key: value}}, f"[{section}] {key} is not used: {reason}", [])
        for section, key, value, reason in (
            ("training", "seed", 1, "a campaign runs each of [campaign] seeds"),
            ("training", "max_steps", 7, "[campaign] max_steps is 500"),
            ("training", "epochs", 1.0, "[campaign] max_steps is 500"),
            ("backend", "adapter_path", "x", "every run of a campaign has an adapter folder of its own"),
            ("logging", "wandb_run_name", "x", "a campaign names its runs"),
            ("logging", "wandb_group", "x", "a campaign groups its runs by condition"),
            ("squeeze", "adapter_path", "x", "a campaign analyzes the adapter of its first run"),
        )
    ),
]


def alone(path: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, key = path.partition(".")
    return {section: {key: value}}


def merge(tables: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, _, key = path.partition(".")
    return {**tables, section: {**tables.get(section, {}), key: value}}


@pytest.mark.parametrize(("path", "value", "reason", "used"), ALONE, ids=[case[0] for case in ALONE])
def test_only_an_unused_option_gets_a_note(path: str, value: Any, reason: str, used: list[dict[str, Any]]) -> None:
    where = options_by_path()[path].where
    assert notes_of(alone(path, value)) == [f"{where} is not used: {reason}"]
    for tables in used:
        assert not [note for note in notes_of(merge(tables, path, value)) if note.startswith(where)]


@pytest.mark.parametrize(("tables", "note", "quiet"), WITH_OTHERS, ids=[case[1] for case in WITH_OTHERS])
def test_an_option_that_others_make_unused_gets_a_note(
    tables: dict[str, Any], note: str, quiet: list[dict[str, Any]]
) -> None:
    assert notes_of(tables) == [note]
    for others in quiet:
        assert notes_of(others) == []


def test_every_reason_is_tested() -> None:
    tried = {path for path, *_ in ALONE} | {f"{s}.{k}" for tables, *_ in WITH_OTHERS for s in tables for k in tables[s]}
    assert set(UNUSED) <= tried
    assert set(UNUSED) <= set(options_by_path())


def test_notes_are_errors_in_strict_mode(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[reward]\ncustom_module = "mine"\n[planning]\nthreshold = 0.5\n')
    assert load_config(path).reward.custom_module == "mine"
    with pytest.raises(ConfigError) as caught:
        load_config(path, strict=True)
    assert [str(problem) for problem in caught.value.issues] == [
        "[planning] threshold is not used: [planning] detector is regex.",
        "[reward] custom_module is not used: [reward] type is match.",
    ]
    load_config(path, {"reward.type": "custom", "planning.detector": "semantic"}, strict=True)


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"transform_mode": "none"}, "gtpo": {"beta": 0.3}, "hicra": {"alpha": 0.3}},
        {"algorithm": {"transform_mode": "gtpo"}, "sepa": {"steps": 7, "delay_steps": 1, "schedule": "auto"}},
        {"loss": {"clip_low": 0.1, "clip_high": 0.3}},
        {"eval": {"samples": 4, "k": 2, "max_examples": 3, "temperature": 1.0, "source": "gsm8k", "split": "train"}},
        {"logging": {"wandb_group": "a", "wandb_tags": "b", "wandb_entity": "c", "wandb_run_name": "d"}},
        {"reward": {"timeout_s": 1.0, "workers": 2}},
        {"campaign": {"max_workers": 2, "stagger_seconds": 1.0}, "squeeze": {"min_variance_retention": 0.9}},
    ],
)
def test_settings_of_a_feature_that_is_off_get_no_note(tables: dict[str, Any]) -> None:
    assert notes_of(tables) == []


def test_an_explicit_default_gets_no_note() -> None:
    tables: dict[str, Any] = {path.partition(".")[0]: {} for path in UNUSED}
    for path in UNUSED:
        section, _, key = path.partition(".")
        tables[section][key] = options_by_path()[path].default
    assert notes_of(tables) == []


THRESHOLD = {"threshold": 0.1}
UNUSED_THRESHOLD = "[planning] threshold is not used: [planning] detector is regex"
MAXRL, SEMANTIC_CONDITION = {"advantage_mode": "maxrl"}, {"detector": "semantic"}


def campaign(*conditions: dict[str, Any], **tables: Any) -> dict[str, Any]:
    return {**tables, "campaign": {"conditions": list(conditions)}}


def test_an_option_that_one_condition_uses_gets_no_note() -> None:
    assert notes_of(campaign(GRPO, SEMANTIC_CONDITION, planning=THRESHOLD)) == []
    off = {"planning": {"detector": "regex"}}
    assert notes_of(campaign(GRPO, off, planning={**THRESHOLD, "detector": "semantic"})) == []


def test_an_option_that_no_condition_uses_gets_one_note() -> None:
    assert notes_of(campaign(GRPO, MAXRL, planning=THRESHOLD)) == [UNUSED_THRESHOLD]
    off = {"planning": {"detector": "regex"}}
    assert notes_of(campaign(off, planning={**THRESHOLD, "detector": "semantic"})) == [UNUSED_THRESHOLD]
    both = campaign(GRPO, backend={"backend": "tinker", "adapter_path": "x"})
    assert notes_of(both) == [
        "[backend] adapter_path is not used: every run of a campaign has an adapter folder of its own"
    ]


def test_an_unused_option_of_a_condition_gets_a_note() -> None:
    expected = f"[campaign] conditions[1]: {UNUSED_THRESHOLD}"
    assert notes_of(campaign(SEMANTIC_CONDITION, THRESHOLD)) == [expected]
    assert notes_of(campaign(GRPO, SEMANTIC_CONDITION | THRESHOLD)) == []
    assert notes_of(campaign(GRPO, THRESHOLD, planning={"threshold": 0.3})) == [expected, UNUSED_THRESHOLD]


def test_the_configuration_of_a_condition_loads_separately() -> None:
    conditions = (GRPO, SEMANTIC_CONDITION, {**SEMANTIC_CONDITION, "threshold": 0.2})
    config = build_config(campaign(*conditions, planning=THRESHOLD), {}, "campaign.toml")
    runs = [build_condition(config, condition, "campaign.toml") for condition in conditions]
    assert [run.planning.threshold for run in runs] == [0.1, 0.1, 0.2]
    assert [run.kind for run in runs] == 3 * ["train"]
    for run in runs:
        assert build_config(parse_toml(dump_config(run), "run"), {}, "run") == run


@pytest.mark.parametrize("kind", ["train", "campaign", "squeeze"])
def test_unused_options_are_noted_in_every_kind_of_file(kind: str) -> None:
    extra: dict[str, Any] = {"campaign": {"campaign": {}}, "squeeze": {"squeeze": {"adapter_path": "a"}}}.get(kind, {})
    for tables in (
        {"distributed": {"gather_for_generation": False}},
        {"model": {"base_url": "http://a:1"}},
        {"teaching": {"student_model": "a/b"}},
    ):
        assert len(notes_of({**tables, **extra})) == 1


@pytest.mark.parametrize(
    ("tables", "flags"),
    [
        ({**TINKER, "model": {"base_url": "http://a:1"}}, {"backend.backend": "local"}),
        ({"backend": {"backend": "tinker", "max_concurrent": 8}}, {"backend.backend": "local"}),
        ({"backend": {"backend": "tinker"}, "training": {"async_steps": 1}}, {"backend.backend": "local"}),
        ({"backend": {"devices": "cpu"}, "inference": {"dtype": "bf16"}}, {"backend.backend": "tinker"}),
        ({"distributed": {"fsdp": True}}, {"backend.backend": "tinker"}),
        ({"reward": {"type": "custom", "custom_module": "mine"}}, {"reward.type": "match"}),
        ({"reward": {"type": "judge", "judge_model": "gpt"}}, {"reward.type": "math"}),
        ({"data": JSONL}, {"data.source": "arithmetic"}),
        ({"data": {"source": "hub", "id": "a/b", "subset": "c"}}, {"data.source": "arithmetic"}),
        ({"environment": ENVIRONMENT}, {"environment.provider": ""}),
        ({"inference": {"engine": "vllm", "url": "http://a:1"}}, {"inference.engine": "pytorch"}),
        ({"inference": {"engine": "vllm", "launch": True, "launch_dtype": "float16"}}, {"inference.engine": "pytorch"}),
        ({"inference": {"dtype": "fp8"}}, {"inference.engine": "vllm"}),
        ({"kl": {"beta": 0.1, "sync_ref_model": True}}, {"kl.beta": 0.0}),
        ({"algorithm": {"advantage_mode": "a.b", "advantage_params": {"x": 1}}}, {"algorithm.advantage_mode": "grpo"}),
        ({"optimizer": {"schedule": "cosine", "schedule_args": {"num_cycles": 1}}}, {"optimizer.schedule": "linear"}),
    ],
)  # fmt: skip
def test_a_flag_may_leave_options_of_the_file_unused(tables: dict[str, Any], flags: dict[str, Any]) -> None:
    assert find_notes(build_config(tables, {}, "run.toml")) == []
    assert find_notes(build_config(tables, flags, "run.toml"))


def test_teaching_defaults_to_an_advantage_that_allows_negative_rewards() -> None:
    assert build_config({}, {"teaching.enabled": True}, "run.toml").algorithm.advantage_mode == "grpo"
    named = build_config({"algorithm": {"advantage_mode": "a.b"}}, {"teaching.enabled": True}, "run.toml")
    assert named.algorithm.advantage_mode == "a.b"
    with pytest.raises(ConfigError, match='Try: advantage_mode = "grpo"'):
        build_config({"algorithm": MAXRL}, {"teaching.enabled": True}, "run.toml")


@pytest.mark.parametrize(
    ("tables", "flag", "note"),
    [
        ({"reward": {"terms": [{"type": "math"}]}}, {"reward.type": "match"}, "[reward] type"),
        ({"environment": ENVIRONMENT}, {"data.source": "math"}, "[data] source"),
        ({"training": {"epochs": 2.0}}, {"training.max_steps": 500}, "[training] max_steps"),
    ],
)
def test_a_flag_without_effect_gets_a_note_even_if_it_has_the_default_value(
    tables: dict[str, Any], flag: dict[str, Any], note: str
) -> None:
    config = build_config(tables, flag, "run.toml")
    assert find_notes(config) == []
    assert [found.where for found in find_notes(config, flag)] == [note]
    with pytest.raises(ConfigError, match="is not used"):
        build_config(tables, flag, "run.toml", strict=True)
