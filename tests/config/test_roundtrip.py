"""A configuration that is written down loads back to an equal one."""

from __future__ import annotations

import datetime
import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.config import TrainConfig, build_config, dump_config
from retrain.config.options import OPTIONAL_SECTIONS, all_options
from retrain.config.toml import format_key, format_value, parse_toml
from retrain.errors import ConfigError
from tests.fuzz import examples

from .strategies import sections, tables, texts

SLOW_START = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(sections(most=25))
@settings(SLOW_START, max_examples=examples(300))
def test_any_configuration_round_trips(chosen: dict[str, dict[str, Any]]) -> None:
    config = TrainConfig.model_validate(chosen)
    assert TrainConfig.model_validate(parse_toml(dump_config(config), "dumped")) == config


@given(tables, st.lists(tables, min_size=1, max_size=3))
@settings(SLOW_START, max_examples=examples(200))
def test_tables_of_arguments_round_trip_with_dates_and_nesting(
    args: dict[str, Any], conditions: list[dict[str, Any]]
) -> None:
    config = TrainConfig.model_validate(
        {"environment": {"args": args}, "algorithm": {"transform_params": args}, "campaign": {"conditions": conditions}}
    )
    read = TrainConfig.model_validate(parse_toml(dump_config(config), "dumped"))
    assert read == config
    assert read.environment.args == args


@given(sections(most=4))
@settings(SLOW_START, max_examples=examples(200))
def test_a_valid_configuration_is_valid_when_it_is_loaded_again(chosen: dict[str, dict[str, Any]]) -> None:
    try:
        config = build_config(chosen, {}, "generated")
    except ConfigError:
        return
    assert build_config(parse_toml(dump_config(config), "dumped"), {}, "dumped") == config


@pytest.mark.parametrize("optional", [(), ("squeeze",), ("campaign",), ("squeeze", "campaign")])
def test_the_defaults_round_trip(optional: tuple[str, ...]) -> None:
    config = build_config({name: {} for name in optional}, {}, "defaults")
    text = dump_config(config)
    assert build_config(parse_toml(text, "dumped"), {}, "dumped") == config
    written = {f"{name}.{key}" for name, table in tomllib.loads(text).items() for key in table}
    assert written == {o.path for o in all_options() if o.section not in OPTIONAL_SECTIONS or o.section in optional}


def test_a_json_string_is_written_back_as_a_table() -> None:
    environment = {"provider": "verifiers", "id": "a/b", "args": '{"n": [1, 2.5, true, {"a": "\\u007f"}], "": {}}'}
    config = build_config({"environment": environment}, {}, "json")
    assert config.environment.args == {"n": [1, 2.5, True, {"a": "\x7f"}], "": {}}
    assert build_config(parse_toml(dump_config(config), "dumped"), {}, "dumped") == config


@given(texts)
def test_any_key_round_trips(key: str) -> None:
    assert tomllib.loads(f"{format_key(key)} = 1") == {key: 1}


@pytest.mark.parametrize(
    "value",
    [1e16, 1e-7, -0.0, float("inf"), -float("inf"), 5e-324, 0, -(2**63), 2**64, 16**5000, "\x7f", "a\rb", "\u2028",
     datetime.time(7, 32), datetime.date(1, 1, 1), datetime.datetime(1979, 5, 27, 7, 32, 0, 999999),
     datetime.datetime(1979, 5, 27, tzinfo=datetime.UTC), [], {}, [{"a": [[]]}, 1.5, "x"]],
    ids=lambda value: format_value(value)[:20],
)  # fmt: skip
def test_a_value_round_trips_with_its_type(value: object) -> None:
    read = tomllib.loads(f"x = {format_value(value)}")["x"]
    assert read == value and type(read) is type(value)
