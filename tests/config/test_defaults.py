"""The documented keys, defaults, choices and the full annotated file."""

from __future__ import annotations

import pytest

from retrain.config import TrainConfig, build_config, find_notes, load_config
from retrain.config.options import OPTIONAL_SECTIONS, all_options, options_by_path, values_of
from retrain.config.toml import parse_toml

from .documented import ANNOTATED, DEFAULTS

DOCUMENTED = [(section, key, value) for section, table in DEFAULTS.items() for key, value in table.items()]
CHOICES = {
    "algorithm.advantage_mode": ("grpo", "maxrl"),
    "algorithm.transform_mode": ("none", "gtpo", "gtpo_hicra", "gtpo_sepa"),
    "sepa.schedule": ("linear", "auto"),
    "inference.attention_kernel": ("default", "flash", "triton", "tk", "cutlass"),
    "inference.dtype": ("auto", "bf16", "fp8", "fp4"),
    "inference.kv_cache_dtype": ("auto", "bf16", "fp8", "int8"),
    "inference.engine": ("pytorch", "max", "vllm", "sglang", "mlx", "openai"),
    "backend.backend": ("local", "tinker"),
    "planning.detector": ("regex", "semantic"),
}


@pytest.mark.parametrize(("section", "key", "value"), DOCUMENTED, ids=lambda part: str(part)[:30])
def test_a_documented_key_exists_with_its_documented_default(section: str, key: str, value: object) -> None:
    default = options_by_path()[f"{section}.{key}"].default
    assert default == value
    assert type(default) is type(value)


def test_the_full_annotated_file_loads_to_the_documented_defaults() -> None:
    config = build_config(parse_toml(ANNOTATED, "annotated.toml"), {}, "annotated.toml")
    values = values_of(config)
    assert {f"{s}.{k}": values[f"{s}.{k}"] for s, k, _ in DOCUMENTED} == {f"{s}.{k}": v for s, k, v in DOCUMENTED}


def test_the_full_annotated_file_trains_and_gets_no_note() -> None:
    config = build_config(parse_toml(ANNOTATED, "annotated.toml"), {}, "annotated.toml")
    assert config.kind == "train"
    assert find_notes(config) == []


def test_only_an_adapter_makes_a_file_with_a_squeeze_table_an_analysis() -> None:
    assert build_config({"squeeze": {}}, {}, "squeeze.toml").kind == "train"
    assert build_config({"squeeze": {"adapter_path": "a"}}, {}, "squeeze.toml").kind == "squeeze"


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in CHOICES.items() for value in values])
def test_every_documented_choice_is_accepted(path: str, value: str) -> None:
    assert values_of(load_config(None, {path: value}))[path] == value


def test_no_file_gives_the_defaults() -> None:
    assert load_config() == TrainConfig() == build_config({}, {}, "nothing")


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.path)
def test_every_default_passes_its_own_check(option) -> None:  # type: ignore[no-untyped-def]
    tables = {name: {} for name in OPTIONAL_SECTIONS if name == option.section}
    config = build_config(tables, {option.path: option.default}, "defaults")
    assert values_of(config)[option.path] == option.default


@pytest.mark.parametrize(
    ("kind", "tables"), [("train", {}), ("squeeze", {"squeeze": {"adapter_path": "a"}}), ("campaign", {"campaign": {}})]
)
def test_the_tables_decide_the_kind_of_run(kind: str, tables: dict[str, object]) -> None:
    assert build_config(tables, {}, "kinds").kind == kind


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().training.lr = 1.0  # type: ignore[misc]
