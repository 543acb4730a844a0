"""Options that only another one brings to life: refused where they would be ignored, alone and in campaigns."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.config import build_config, dump_config
from retrain.config.load import build_condition
from retrain.config.needs import NEEDS
from retrain.config.options import all_options, options_by_path
from retrain.config.toml import parse_toml
from retrain.errors import ConfigError

GRPO = {"advantage_mode": "grpo"}
ENVIRONMENT = {"provider": "verifiers", "id": "a/b"}
JSONL = {"source": "jsonl", "path": "a.jsonl"}
SEMANTIC = {"planning": {"detector": "semantic"}}
TEMPLATES = {
    "teacher_adaptive_template": "{question} {approach}",
    "student_with_teaching_template": "{question}{teaching}",
}


def problems_in(tables: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_config(tables, {}, "run.toml")
    return [str(problem) for problem in caught.value.problems]


# The option, a value for it, what it needs in words, and tables in which it has an effect.
CASES: list[tuple[str, Any, str, list[dict[str, Any]]]] = [
    ("backend.max_concurrent", 8, '[backend] backend = "tinker"', [{"backend": {"backend": "tinker"}}]),
    ("backend.throttle_dir", "/tmp/t", '[backend] backend = "tinker"', [{"backend": {"backend": "mine.build"}}]),
    ("model.base_url", "http://a:1", '[backend] backend = "tinker"', [{"backend": {"backend": "tinker"}}]),
    *(
        (f"inference.{key}", value, "[inference] launch = true", [{"inference": {"engine": "vllm", "launch": True}}])
        for key, value in {
            "launch_device": "cpu",
            "gpu_memory_utilization": 0.5,
            "launch_dtype": "float16",
            "max_model_len": 512,
        }.items()
    ),
    *(
        (
            f"inference.{key}",
            value,
            "an [inference] engine that is a server",
            [{"inference": {"engine": "vllm"}}, {"inference": {"engine": "mine.Engine"}}],
        )
        for key, value in (("adapter_dir", "/shared"), ("timeout_s", 5.0), ("wait_s", 5.0))
    ),
    ("kl.ref_model_mixup_alpha", 0.5, "[kl] sync_ref_model = true", [{"kl": {"beta": 0.1, "sync_ref_model": True}}]),
    ("kl.ref_model_sync_steps", 5, "[kl] sync_ref_model = true", [{"kl": {"beta": 0.1, "sync_ref_model": True}}]),
    (
        "memory.offload_untrained_models",
        True,
        "a reference ([kl] beta) or a student of its own ([teaching] student_model)",
        [
            {"kl": {"beta": 0.1}},
            {"teaching": {"enabled": True, "student_model": "a/b"}, "algorithm": GRPO},
            {"teaching": {"enabled": True}, "algorithm": GRPO, "model": {"lora_rank": 0}},
        ],
    ),
    ("planning.model", "mine", '[planning] detector = "semantic"', [SEMANTIC, {"planning": {"detector": "a.B"}}]),
    ("planning.threshold", 0.1, '[planning] detector = "semantic"', [SEMANTIC, {"planning": {"detector": "a.B"}}]),
    (
        "data.subset",
        "geometry",
        '[data] source = "math", "gsm8k" or "hub"',
        [
            {"data": {"source": "math"}},
            {"data": {"source": "gsm8k"}},
            {"data": {"source": "hub", "id": "a/b"}},
            {"data": {"source": "mine.Source"}},
            {"data": JSONL, "eval": {"every": 5, "source": "math"}},
        ],
    ),
    ("data.split", "dev", '[data] source other than "jsonl"', [{"data": {"source": "arithmetic"}}, {}]),
    *(
        (
            f"data.{key}",
            "text",
            '[data] source = "jsonl" or "hub"',
            [
                {"data": JSONL},
                {"data": {"source": "hub", "id": "a/b"}},
                {"data": {"source": "mine.Source"}},
                {"eval": {"every": 5, "source": "jsonl", "path": "a.jsonl"}},
            ],
        )
        for key in ("prompt_field", "answer_field")
    ),
    ("environment.args", {"n": 1}, "[environment] provider", [{"environment": ENVIRONMENT}]),
    ("environment.max_turns", 3, "[environment] provider", [{"environment": ENVIRONMENT}]),
    ("environment.auto_install", True, "[environment] provider", [{"environment": ENVIRONMENT}]),
    ("environment.timeout_s", 5.0, "[environment] provider", [{"environment": ENVIRONMENT}]),
    *(
        (
            f"reward.judge_{key}",
            value,
            '[reward] type = "judge"',
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
    (
        "reward.custom_function",
        "grade",
        '[reward] type = "custom"',
        [{"reward": {"type": "custom", "custom_module": "mine"}}],
    ),
    *(
        (
            option.path,
            TEMPLATES.get(option.key, "a {question}" if option.type_name == "str" else 7),
            "[teaching] enabled = true",
            [{"teaching": {"enabled": True}, "algorithm": GRPO}],
        )
        for option in all_options()
        if option.section == "teaching" and option.key != "enabled"
    ),
    ("distributed.offload_optimizer", True, "[distributed] zero_stage = 1 or 3", [{"distributed": {"zero_stage": 1}}]),
    ("distributed.offload_parameters", True, "[distributed] zero_stage = 3", [{"distributed": {"zero_stage": 3}}]),
    (
        "distributed.gather_for_generation",
        False,
        "[distributed] zero_stage = 3 or fsdp = true",
        [
            {"distributed": {"zero_stage": 3}, "inference": {"engine": "vllm"}},
            {"distributed": {"fsdp": True}, "inference": {"engine": "vllm"}},
        ],
    ),
    *(
        (
            option.path,
            0.25 if option.type_name == "float" else 5,
            "[backpressure] enabled = true",
            [{"backpressure": {"enabled": True}}],
        )
        for option in all_options()
        if option.section == "backpressure" and option.key != "enabled"
    ),
]

# Needs that only fail in the company of other options: what is refused, its sentence, and what is not.
IN_COMPANY: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        {"loss": {"type": "cispo", "ratio_cap": 3.0}},
        '[loss] ratio_cap = 3.0 has no effect: it needs [loss] type other than "cispo".',
        [{"loss": {"type": "cispo", "ratio_cap": 0.0}}, {"loss": {"type": "ppo", "ratio_cap": 3.0}}],
    ),
    (
        {**SEMANTIC, "logging": {"strategic_grams": "wait"}},
        '[logging] strategic_grams = "wait" has no effect: it needs [planning] detector = "regex".',
        [
            {"logging": {"strategic_grams": "wait"}},
            {"planning": {"detector": "a.B"}, "logging": {"strategic_grams": "wait"}},
        ],
    ),
    (
        {"data": {"source": "arithmetic", "subset": "geometry"}},
        '[data] subset = "geometry" has no effect: it needs [data] source = "math", "gsm8k" or "hub".',
        [],
    ),
    (
        {"data": {**JSONL, "subset": "geometry"}},
        '[data] subset = "geometry" has no effect: it needs [data] source = "math", "gsm8k" or "hub".',
        [],
    ),
    (
        {"data": {**JSONL, "split": "dev"}},
        '[data] split = "dev" has no effect: it needs [data] source other than "jsonl".',
        [],
    ),
    (
        {"data": JSONL, "eval": {"every": 5, "path": "b.jsonl", "split": "dev"}},
        '[eval] split = "dev" has no effect: it needs [eval] source other than "jsonl".',
        [{"data": JSONL, "eval": {"path": "b.jsonl", "split": "dev"}}, {"eval": {"every": 5, "split": "dev"}}],
    ),
    (
        {"data": {"prompt_field": "x"}, "eval": {"source": "jsonl", "path": "b.jsonl"}},
        '[data] prompt_field = "x" has no effect: it needs [data] source = "jsonl" or "hub".',
        [],
    ),
    (
        {"reward": {"custom_function": "grade", "terms": [{"type": "custom", "custom_module": "mine"}]}},
        '[reward] custom_function = "grade" has no effect: it needs [reward] type = "custom".',
        [{"reward": {"terms": [{"type": "custom", "custom_module": "mine", "custom_function": "grade"}]}}],
    ),
    (
        {"reward": {"terms": [{}, {"type": "match", "custom_function": "grade"}]}},
        '[reward] terms[1].custom_function = "grade" has no effect: it needs type = "custom".',
        [],
    ),
    (
        {"campaign": {"gpus_per_run": 0.5}},
        '[campaign] gpus_per_run = 0.5 has no effect: it needs [campaign] executor = "ray".',
        [{"campaign": {"gpus_per_run": 0.5, "executor": "ray"}}],
    ),
    (
        {"distributed": {"zero_stage": 1, "offload_parameters": True}},
        "[distributed] offload_parameters = true has no effect: it needs [distributed] zero_stage = 3.",
        [],
    ),
    *(
        (
            {"model": {"lora_rank": 0}, "lora": {key: value}},
            f"[lora] {key} = {shown} has no effect: it needs an adapter: [model] lora_rank above 0.",
            [{"lora": {key: value}}],
        )
        for key, value, shown in (("alpha", 8, "8"), ("dropout", 0.1, "0.1"), ("target_modules", "q_proj", '"q_proj"'))
    ),
    (
        {"data": {"source": "gsm8k", "remove_unused_columns": True}},
        '[data] remove_unused_columns = true has no effect: it needs [data] source = "math", "jsonl" or "hub".',
        [{"data": {"remove_unused_columns": True}}, {"data": {**JSONL, "remove_unused_columns": True}}],
    ),
]


def alone(path: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, key = path.partition(".")
    return {section: {key: value}}


def merge(tables: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, _, key = path.partition(".")
    return {**tables, section: {**tables.get(section, {}), key: value}}


@pytest.mark.parametrize(("path", "value", "need", "alive"), CASES, ids=[case[0] for case in CASES])
def test_an_option_without_effect_is_refused_and_one_with_effect_is_not(
    path: str, value: Any, need: str, alive: list[dict[str, Any]]
) -> None:
    if path not in ("data.subset", "data.split"):
        (problem,) = problems_in(alone(path, value))
        assert problem.startswith(f"{options_by_path()[path].where} = ")
        assert problem.endswith(f" has no effect: it needs {need}.")
    for tables in alive:
        build_config(merge(tables, path, value), {}, "run.toml")
    assert NEEDS[path].text == need


@pytest.mark.parametrize(("dead", "problem", "alive"), IN_COMPANY, ids=[case[1] for case in IN_COMPANY])
def test_an_option_that_its_company_leaves_without_effect_is_refused(
    dead: dict[str, Any], problem: str, alive: list[dict[str, Any]]
) -> None:
    assert problems_in(dead) == [problem]
    for tables in alive:
        build_config(tables, {}, "run.toml")


def test_every_need_is_tried() -> None:
    tried = {path for path, *_ in CASES} | {f"{s}.{k}" for dead, *_ in IN_COMPANY for s in dead for k in dead[s]}
    # environment.id has a rule of its own, with a better sentence.
    assert set(NEEDS) - tried == {"environment.id"}
    assert set(NEEDS) <= set(options_by_path())


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"transform_mode": "none"}, "gtpo": {"beta": 0.3}, "hicra": {"alpha": 0.3}},
        {"algorithm": {"transform_mode": "gtpo"}, "sepa": {"steps": 7, "delay_steps": 1, "schedule": "auto"}},
        {"loss": {"clip_low": 0.1, "clip_high": 0.3}},
        {"eval": {"samples": 4, "k": 2, "max_examples": 3, "temperature": 1.0, "source": "gsm8k", "split": "train"}},
        {"logging": {"wandb_group": "a", "wandb_tags": "b", "wandb_entity": "c", "wandb_run_name": "d"}},
        {"reward": {"timeout_s": 1.0, "workers": 2}},
        {"squeeze": {"compress_to": 4, "source_rank": 8}},
        {"campaign": {"max_workers": 2, "stagger_seconds": 1.0}},
    ],
)
def test_settings_of_what_is_merely_switched_off_are_kept(tables: dict[str, Any]) -> None:
    build_config(tables, {}, "run.toml")


def test_a_default_that_is_written_down_is_no_wish() -> None:
    tables = {name.partition(".")[0]: {} for name in NEEDS}
    for path in NEEDS:
        section, _, key = path.partition(".")
        tables[section][key] = options_by_path()[path].default
    build_config(tables, {}, "run.toml")


def test_a_value_that_could_not_be_read_is_not_held_against_what_needs_it() -> None:
    assert len(problems_in({"planning": {"detector": 5}, "logging": {"strategic_grams": "wait"}})) == 1
    assert len(problems_in({"backend": {"backend": 5}, "model": {"base_url": "http://a:1"}})) == 1
    assert len(problems_in({"planning": {"detector": "semntic", "threshold": 0.5}})) == 1


def test_an_option_of_which_something_worse_is_said_is_reported_once() -> None:
    assert len(problems_in({"model": {"base_url": "nonsense"}})) == 1
    assert len(problems_in({"environment": {"max_turns": 0}})) == 1
    assert len(problems_in({"model": {"base_url": "nonsense"}, "campaign": {}})) == 1


def test_a_long_value_is_cut() -> None:
    (problem,) = problems_in({"backend": {"throttle_dir": "x" * 10_000}})
    assert len(problem) < 200


THRESHOLD = {"threshold": 0.1}
IDLE_THRESHOLD = '[planning] threshold = 0.1 has no effect: it needs [planning] detector = "semantic".'
GRPO, MAXRL, SEMANTIC_CONDITION = {"advantage_mode": "grpo"}, {"advantage_mode": "maxrl"}, {"detector": "semantic"}


def campaign(*conditions: dict[str, Any], **tables: Any) -> dict[str, Any]:
    return {**tables, "campaign": {"conditions": list(conditions)}}


def test_a_campaign_may_set_for_all_what_one_condition_uses() -> None:
    build_config(campaign(GRPO, SEMANTIC_CONDITION, planning=THRESHOLD), {}, "campaign.toml")
    off = {"planning": {"detector": "regex"}}
    build_config(campaign(GRPO, off, planning={**THRESHOLD, "detector": "semantic"}), {}, "campaign.toml")


def test_what_no_condition_uses_is_refused_once() -> None:
    assert problems_in(campaign(GRPO, MAXRL, planning=THRESHOLD)) == [IDLE_THRESHOLD]
    off = {"planning": {"detector": "regex"}}
    assert problems_in(campaign(off, planning={**THRESHOLD, "detector": "semantic"})) == [IDLE_THRESHOLD]


def test_a_condition_answers_for_what_it_sets_itself() -> None:
    expected = f"[campaign] conditions[1]: {IDLE_THRESHOLD}"
    assert problems_in(campaign(SEMANTIC_CONDITION, THRESHOLD)) == [expected]
    build_config(campaign(GRPO, SEMANTIC_CONDITION | THRESHOLD), {}, "campaign.toml")
    both = problems_in(campaign(GRPO, THRESHOLD, planning={"threshold": 0.3}))
    assert both == [expected, IDLE_THRESHOLD.replace("0.1", "0.3")]


def test_the_run_of_a_condition_loads_on_its_own() -> None:
    conditions = (GRPO, SEMANTIC_CONDITION, {**SEMANTIC_CONDITION, "threshold": 0.2})
    config = build_config(campaign(*conditions, planning=THRESHOLD), {}, "campaign.toml")
    runs = [build_condition(config, condition, "campaign.toml") for condition in conditions]
    assert [run.planning.threshold for run in runs] == [0.02, 0.1, 0.2]
    assert [run.kind for run in runs] == 3 * ["train"]
    for run in runs:
        assert build_config(parse_toml(dump_config(run), "run"), {}, "run") == run


@pytest.mark.parametrize("kind", ["train", "campaign", "squeeze"])
def test_what_is_ignored_is_refused_in_every_kind_of_file(kind: str) -> None:
    extra: dict[str, Any] = {} if kind == "train" else {kind: {}}
    for tables in (
        {"distributed": {"offload_optimizer": True}},
        {"model": {"base_url": "http://a:1"}},
        {"teaching": {"student_model": "a/b"}},
    ):
        assert len(problems_in({**tables, **extra})) == 1
