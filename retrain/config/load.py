"""TOML + .env + flags -> TrainConfig, or one ConfigError that lists every problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.config.conditions import condition_overrides
from retrain.config.needs import Note, unused_options
from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options, options_by_path
from retrain.config.rules import find_conflicts
from retrain.config.schema import TrainConfig
from retrain.config.synonyms import find_synonym
from retrain.config.toml import (
    MAX_DEPTH,
    format_key,
    format_toml,
    format_value,
    is_too_deep,
    read_toml,
    show_path,
    show_value,
)
from retrain.errors import ConfigError, ConfigIssue

Tables = dict[str, Any]

# More than a screenful helps nobody, and looking for likely spellings takes time.
MAX_PROBLEMS = 50
_SHOWN = 60
_TYPE_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
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


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, strict: bool = False
) -> TrainConfig:
    """Read a file (or only defaults, for None), apply `{"section.key": value}` overrides, check all of it.

    Options that are set and not used are no error, unless `strict`; `find_notes` lists them.
    """
    if path is not None and not str(path):
        raise ConfigError("the path of the configuration is empty.  Try: name a TOML file.")
    if path is None:
        return build_config({}, overrides or {}, "the configuration", strict)
    return build_config(read_toml(Path(path)), overrides or {}, show_path(Path(path)), strict)


def build_config(tables: Tables, overrides: Mapping[str, Any], source: str, strict: bool = False) -> TrainConfig:
    """Check nested tables with overrides on top; `source` is how the error calls them."""
    merged, problems = _apply_overrides(tables, overrides)
    problems += _drop_too_deep(merged)
    _choose_for_teaching(merged)
    config, problems = _judge(merged, problems)
    problems += _check_conditions(config, merged, known=frozenset(problems))
    if strict and not problems:
        problems = [ConfigIssue(note.where, f"is not used: {note.reason}.") for note in find_notes(config)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        left_out = len(problems) - MAX_PROBLEMS
        shown = [*problems[:MAX_PROBLEMS], ConfigIssue("", f"and {left_out} more.")] if left_out > 0 else problems
        raise ConfigError(f"{source} has {count}:", tuple(shown))
    return config


def _choose_for_teaching(tables: Tables) -> None:
    """The default advantage, maxrl, cannot be had of rewards below 0, which teaching has: where none is named, grpo."""
    teaching, algorithm = tables.get("teaching"), tables.setdefault("algorithm", {})
    if isinstance(teaching, dict) and teaching.get("enabled") is True and isinstance(algorithm, dict):
        algorithm.setdefault("advantage_mode", "grpo")


def build_condition(config: TrainConfig, condition: Mapping[str, Any], source: str) -> TrainConfig:
    """The run of one condition of a campaign, on its own."""
    base = {name: table for name, table in config.model_dump(by_alias=True).items() if name not in OPTIONAL_SECTIONS}
    return build_config(base, dict(condition_overrides(condition)), source)


def find_notes(config: TrainConfig) -> list[Note]:
    """Options that are set and not used.

    What the file of a campaign sets for all its runs is used if one of them uses it.
    """
    notes = list(unused_options(config))
    runs: list[tuple[set[str], list[Note]]] = []
    for index, condition in enumerate(config.campaign.conditions if config.campaign is not None else ()):
        found = list(unused_options(build_condition(config, condition, "the campaign")))
        own = {options_by_path()[path].where for path, _ in condition_overrides(condition)}
        runs.append((own, found))
        notes += [Note(f"[campaign] conditions[{index}]: {n.where}", n.reason) for n in found if n.where in own]
    shared = dict.fromkeys(note for own, found in runs for note in found if note.where not in own)
    notes += [note for note in shared if all(note.where in own or note in found for own, found in runs)]
    return list({note.where: note for note in reversed(notes)}.values())[::-1]


def dump_config(config: TrainConfig) -> str:
    """The whole configuration as TOML that loads back to an equal one."""
    tables = config.model_dump(by_alias=True)
    return format_toml({name: table for name, table in tables.items() if table is not None})


def _apply_overrides(tables: Tables, overrides: Mapping[str, Any]) -> tuple[Tables, list[ConfigIssue]]:
    """Two levels are copied, which is as deep as anything here changes."""
    merged = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    problems = []
    for path, value in overrides.items():
        section, _, key = path.partition(".")
        if path not in options_by_path():
            problems.append(_unknown_key(section, key or path))
        elif section in OPTIONAL_SECTIONS and section not in merged:
            problems.append(
                ConfigIssue(
                    f"[{section}] {key}", "was set, but the file has no such table.", f"Try: add a [{section}] table"
                )
            )
        elif isinstance(merged.setdefault(section, {}), dict):
            merged[section][key] = value
    return merged, problems


def _drop_too_deep(tables: Tables) -> Iterator[ConfigIssue]:
    """Take out what is nested so deeply that printing, comparing or dumping it would run out of stack."""
    text = f"is nested more than {MAX_DEPTH} levels deep."
    for section, table in list(tables.items()):
        if not isinstance(table, dict):
            if is_too_deep(table):
                del tables[section]
                yield ConfigIssue(f"[{_show_key(section)}]", text)
            continue
        for key in [key for key, value in table.items() if is_too_deep(value)]:
            del table[key]
            yield ConfigIssue(f"[{_show_key(section)}] {_show_key(key)}", text)


def _check_shape(tables: Tables) -> tuple[TrainConfig, list[ConfigIssue]]:
    """Validate; bad keys are reported and left at their defaults, so that the rules can still judge the rest."""
    try:
        return _validate(tables), []
    except ValidationError as error:
        # One sentence an option: the first complaint about a list is enough.
        first: dict[tuple[Any, ...], Any] = {}
        for detail in error.errors(include_url=False):
            first.setdefault(tuple(detail["loc"][:2]), detail)
        remaining = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
        for location in first:
            _drop(remaining, location)
        return _validate(remaining), list(_explain_all(first.values()))


def _validate(tables: Tables) -> TrainConfig:
    # An absent table is given as an empty one: calling its default factory would build its model a second time.
    present: Tables = {name: {} for name in TrainConfig.model_fields if name not in OPTIONAL_SECTIONS} | tables
    # by_name=False: a TOML key is the alias alone, `from` and not `from_`.
    return TrainConfig.model_validate(present, by_alias=True, by_name=False)


def _drop(tables: Tables, location: tuple[Any, ...]) -> None:
    section = tables.get(location[0])
    if len(location) == 1 or not isinstance(section, dict):
        tables.pop(location[0], None)
    else:
        section.pop(location[1], None)


def _judge(tables: Tables, judged: list[ConfigIssue]) -> tuple[TrainConfig, list[ConfigIssue]]:
    """The configuration, and all its problems with those already `judged`."""
    config, shape_problems = _check_shape(tables)
    judged = judged + shape_problems
    return config, judged + find_conflicts(config, judged)


def _check_conditions(config: TrainConfig, tables: Tables, known: frozenset[ConfigIssue]) -> Iterator[ConfigIssue]:
    """Every condition must be a valid run of its own, so that a campaign does not fail at its last one."""
    base = {name: table for name, table in tables.items() if name not in OPTIONAL_SECTIONS}
    for index, condition in enumerate(config.campaign.conditions if config.campaign is not None else ()):
        merged, _ = _apply_overrides(base, dict(condition_overrides(condition)))
        for problem in _judge(merged, [])[1]:
            if problem not in known:
                yield ConfigIssue(f"[campaign] conditions[{index}]: {problem.where}", problem.text, problem.hint)


def _explain_all(details: Iterable[Any]) -> Iterator[ConfigIssue]:
    for count, detail in enumerate(details):
        location = tuple(detail["loc"])
        if count < MAX_PROBLEMS:
            yield _explain(location, detail)
        else:
            yield ConfigIssue(".".join(str(part) for part in location[:2]), "is wrong.")


def _explain(location: tuple[Any, ...], detail: Any) -> ConfigIssue:
    """Turn one pydantic complaint into a sentence with table, key, value and what to write instead."""
    kind, value = detail["type"], detail["input"]
    section = str(location[0])
    if len(location) == 1:
        if kind == "extra_forbidden":
            return _unknown_section(section, value)
        hint = f"Try: [{section}], with single brackets" if _is_list_of_tables(value) else f"Try: [{section}]"
        return ConfigIssue(f"[{section}]", f"must be a table, got {show_value(value)}.", hint)
    option = options_by_path().get(f"{section}.{location[1]}")
    if option is None:
        return _unknown_key(section, str(location[1]))
    inside = "".join(f"[{part}]" if isinstance(part, int) else f".{_show_key(str(part))}" for part in location[2:])
    if kind == "extra_forbidden":
        known = option.element_keys
        close = get_close_matches(str(location[-1])[:_SHOWN], known, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
        return ConfigIssue(f"{option.where}{inside}", "is unknown.", hint)
    text = f"{_requirement(kind, detail)}, got {show_value(value)}."
    return ConfigIssue(f"{option.where}{inside}", text, _suggest_value(option, value))


def _suggest_value(option: Option, value: object) -> str:
    if option.type_name == "list[str]" and isinstance(value, str):
        return f"Try: {option.key} = {format_value([value])}"
    return f"Try: {option.key} = {format_value(option.default)}"


def _requirement(kind: str, detail: Any) -> str:
    context = detail.get("ctx", {})
    if kind in _TYPE_WORDS:
        return f"must be {_TYPE_WORDS[kind]}"
    if kind in _BOUND_WORDS:
        sign, name = _BOUND_WORDS[kind]
        bound = context[name]
        return f"must be {sign} {bound:g}" if abs(bound) < 1e6 else f"must be {sign} {bound}"
    if kind == "literal_error":
        choices = context["expected"].replace(" or ", ", ")
        return f"must be one of {choices.replace('True', 'true').replace('False', 'false')}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "value_error":
        return str(context["error"])
    return str(detail["msg"]).lower()


def _unknown_section(section: str, value: object) -> ConfigIssue:
    if not isinstance(value, Mapping) and not _is_list_of_tables(value):
        homes = [option.where for option in all_options() if option.key == section]
        hint = f"Did you mean {homes[0]}?" if homes else "Options stand inside a [table]."
        return ConfigIssue(f"unknown option {_show_key(section)}", "outside any table.", hint)
    close = get_close_matches(section[:_SHOWN], TrainConfig.model_fields, n=1)
    hint = f"Did you mean [{close[0]}]?" if close else f"Tables: {', '.join(TrainConfig.model_fields)}."
    return ConfigIssue(f"unknown table [{_show_key(section)}].", "", hint)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _unknown_key(section: str, key: str) -> ConfigIssue:
    """Look for the key by exact name in the other tables, then for a like one in its own, then anywhere."""
    options = all_options()
    own = get_close_matches(key[:_SHOWN], [option.key for option in options if option.section == section], n=1)
    homes = [option.where for option in options if option.key == key]
    near = get_close_matches(key[:_SHOWN], [option.key for option in options], n=1)
    synonym = find_synonym(key)
    if synonym is not None and synonym.section == section:
        hint = f"Did you mean {synonym.key}?"
    elif homes:
        hint = f"Did you mean {homes[0]}?"
    elif synonym is not None:
        hint = f"Did you mean {synonym.where}?"
    elif key in TrainConfig.model_fields:
        hint = f"Did you mean the table [{key}]?"
    elif own:
        hint = f"Did you mean {own[0]}?"
    elif near:
        hint = f"Did you mean {next(option.where for option in options if option.key == near[0])}?"
    else:
        hint = "`retrain help` lists every option."
    return ConfigIssue(f"unknown option [{_show_key(section)}] {_show_key(key)}.", "", hint)


def _show_key(key: str) -> str:
    """A key as TOML would spell it, so that control characters and odd spaces are seen."""
    text = format_key(key)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
