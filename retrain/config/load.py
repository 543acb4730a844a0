"""TOML + .env + flags -> TrainConfig, or one ConfigError that lists every problem."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.config.options import OPTIONAL_SECTIONS, all_options, options_by_path
from retrain.config.rules import find_conflicts
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_toml, format_value, read_toml
from retrain.errors import ConfigError, Problem

Tables = dict[str, Any]

_TYPE_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_BOUND_WORDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read a file (or only defaults, for None), apply `{"section.key": value}` overrides, check all of it."""
    tables = read_toml(Path(path)) if path is not None else {}
    return build_config(tables, overrides or {}, source=str(path) if path is not None else "the configuration")


def build_config(tables: Tables, overrides: Mapping[str, Any], source: str) -> TrainConfig:
    """Check nested tables with overrides on top; `source` is how the error calls them."""
    merged, problems = _apply_overrides(tables, overrides)
    config, shape_problems = _check_shape(merged)
    problems += shape_problems
    reported = {problem.where for problem in problems}
    problems += [problem for problem in find_conflicts(config) if problem.where not in reported]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source} has {count}:", tuple(problems))
    return config


def dump_config(config: TrainConfig) -> str:
    """The whole configuration as TOML that loads back to an equal one."""
    tables = config.model_dump(by_alias=True)
    return format_toml({name: table for name, table in tables.items() if table is not None})


def _apply_overrides(tables: Tables, overrides: Mapping[str, Any]) -> tuple[Tables, list[Problem]]:
    merged = copy.deepcopy(tables)
    problems = []
    for path, value in overrides.items():
        section, _, key = path.partition(".")
        if path not in options_by_path():
            problems.append(_unknown_key(section, key or path))
        elif section in OPTIONAL_SECTIONS and section not in merged:
            problems.append(
                Problem(
                    f"[{section}] {key}", "was set, but the file has no such table.", f"Try: add a [{section}] table"
                )
            )
        elif isinstance(merged.setdefault(section, {}), dict):
            merged[section][key] = value
    return merged, problems


def _check_shape(tables: Tables) -> tuple[TrainConfig, list[Problem]]:
    """Validate; bad keys are reported and left at their defaults, so that the rules can still judge the rest."""
    try:
        return TrainConfig.model_validate(tables), []
    except ValidationError as error:
        problems: dict[tuple[Any, ...], Problem] = {}
        remaining = copy.deepcopy(tables)
        for detail in error.errors(include_url=False):
            location = tuple(detail["loc"])
            # One sentence an option: the first complaint about a list is enough.
            problems.setdefault(location[:2], _explain(location, detail))
            _drop(remaining, location)
        return TrainConfig.model_validate(remaining), list(problems.values())


def _drop(tables: Tables, location: tuple[Any, ...]) -> None:
    section = tables.get(location[0])
    if len(location) == 1 or not isinstance(section, dict):
        tables.pop(location[0], None)
    else:
        section.pop(location[1], None)


def _explain(location: tuple[Any, ...], detail: Any) -> Problem:
    """Turn one pydantic complaint into a sentence with table, key, value and what to write instead."""
    kind, value = detail["type"], detail["input"]
    section = str(location[0])
    if len(location) == 1:
        return (
            _unknown_section(section, value)
            if kind == "extra_forbidden"
            else Problem(f"[{section}]", f"must be a table, got {_show(value)}.")
        )
    key = str(location[1])
    option = options_by_path().get(f"{section}.{key}")
    if option is None:
        return _unknown_key(section, key)
    inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[2:])
    if kind == "extra_forbidden":
        return Problem(option.where, f"has an unknown key {inside.lstrip('.')}.")
    hint = f"Try: {key} = {format_value(option.default)}"
    return Problem(
        option.where, f"{inside + ' ' if inside else ''}{_requirement(kind, detail)}, got {_show(value)}.", hint
    )


def _requirement(kind: str, detail: Any) -> str:
    context = detail.get("ctx", {})
    if kind in _TYPE_WORDS:
        return f"must be {_TYPE_WORDS[kind]}"
    if kind in _BOUND_WORDS:
        sign, name = _BOUND_WORDS[kind]
        return f"must be {sign} {context[name]:g}"
    if kind == "literal_error":
        return f"must be one of {context['expected'].replace(' or ', ', ')}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "value_error":
        return str(context["error"])
    return str(detail["msg"]).lower()


def _show(value: object) -> str:
    text = format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown_section(section: str, value: object) -> Problem:
    if not isinstance(value, Mapping):
        homes = [option.where for option in all_options() if option.key == section]
        hint = f"Did you mean {homes[0]}?" if homes else "Options stand inside a [table]."
        return Problem(f"unknown option {_show_key(section)}", "outside any table.", hint)
    close = get_close_matches(section, TrainConfig.model_fields, n=1)
    hint = f"Did you mean [{close[0]}]?" if close else f"Tables: {', '.join(TrainConfig.model_fields)}."
    return Problem(f"unknown table [{_show_key(section)}].", "", hint)


def _unknown_key(section: str, key: str) -> Problem:
    """Look for the key in its own table, then by exact name in the others, then by likeness anywhere."""
    options = all_options()
    own = get_close_matches(key, [option.key for option in options if option.section == section], n=1)
    homes = [option.where for option in options if option.key == key]
    near = get_close_matches(key, [option.key for option in options], n=1)
    if homes:
        hint = f"Did you mean {homes[0]}?"
    elif own:
        hint = f"Did you mean {own[0]}?"
    elif near:
        hint = f"Did you mean {next(option.where for option in options if option.key == near[0])}?"
    else:
        hint = "`retrain help` lists every option."
    return Problem(f"unknown option [{_show_key(section)}] {_show_key(key)}.", "", hint)


def _show_key(key: str) -> str:
    return key if len(key) <= 60 else f"{key[:57]}..."
