"""Load a configuration: TOML and flags become a TrainConfig, or one ConfigError that lists all issues."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from retrain.config.options import (
    OPTIONAL_SECTIONS,
    Option,
    all_options,
    condition_overrides,
    option_issue,
    options_by_path,
    resolve_flags,
    section_type,
)
from retrain.config.rules import find_issues
from retrain.config.schema import TrainConfig
from retrain.config.synonyms import find_synonym
from retrain.config.toml import (
    MAX_DEPTH,
    format_key,
    format_toml,
    format_value,
    is_too_deep,
    parse_toml,
    read_text,
    show_path,
    show_value,
)
from retrain.config.unused import Note, unused_options
from retrain.errors import ConfigError, ConfigIssue

Tables = dict[str, Any]
Location = tuple[int | str, ...]

# More than fits a screen is no help, and suggesting spellings takes time.
MAX_ISSUES = 50
_SHOWN = 60
_ZERO = "Try: fsdp = true, or `retrain grpo` with accelerate/zero3.yaml for ZeRO"
REMOVED: dict[tuple[str, str], tuple[object, str]] = {
    ("distributed", "zero_stage"): (0, _ZERO),
    ("distributed", "offload_optimizer"): (False, _ZERO),
    ("distributed", "offload_parameters"): (False, _ZERO),
}
"""Options of earlier versions by table and key: the former default, and what to use instead."""
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
    path: str | Path | None = None, overrides: Mapping[str, object] | None = None, strict: bool = False
) -> TrainConfig:
    """Read a file (or only defaults, for None), apply `{"section.key": value}` overrides and validate the result.

    Options that are set and not used are an error only if `strict`; `find_notes` lists them.
    """
    if path is not None and not str(path):
        raise ConfigError("the path of the configuration is empty.  Try: name a TOML file.")
    if path is None:
        return build_config({}, overrides or {}, "the configuration", strict)
    name = show_path(Path(path))
    return build_config(parse_toml(read_text(Path(path)), name), overrides or {}, name, strict)


def load_recorded(path: Path) -> TrainConfig:
    """The configuration in a run's folder, to look at: while its text is the same, so is the object."""
    return parse_recorded(read_text(path), show_path(path))


@lru_cache(maxsize=512)
def parse_recorded(text: str, name: str) -> TrainConfig:
    """The configuration in a text that a run wrote; `name` is for errors."""
    return build_config(parse_toml(text, name), {}, name)


def build_config(tables: Tables, overrides: Mapping[str, object], source: str, strict: bool = False) -> TrainConfig:
    """Validate nested tables with overrides on top; `source` is their name in the error."""
    merged, issues = _apply_overrides(tables, overrides)
    issues += _drop_too_deep(merged)
    _drop_removed(merged)
    _choose_for_teaching(merged)
    config, issues = _validate(merged, issues)
    issues += _check_conditions(config, merged, known=frozenset(issues))
    if strict and not issues:
        issues = [ConfigIssue(note.where, f"is not used: {note.reason}.") for note in find_notes(config, overrides)]
    if issues:
        count = "1 problem" if len(issues) == 1 else f"{len(issues)} problems"
        left_out = len(issues) - MAX_ISSUES
        shown = [*issues[:MAX_ISSUES], ConfigIssue("", f"and {left_out} more.")] if left_out > 0 else issues
        raise ConfigError(f"{source} has {count}:", tuple(shown))
    return config


def _choose_for_teaching(tables: Tables) -> None:
    """Default to grpo: teaching has negative rewards, which maxrl, the default advantage, does not support."""
    teaching, algorithm = tables.get("teaching"), tables.setdefault("algorithm", {})
    is_taught = isinstance(teaching, dict) and teaching.get("enabled") is True
    if is_taught and isinstance(algorithm, dict) and not algorithm.get("algorithm_mode"):
        algorithm.setdefault("advantage_mode", "grpo")


def build_condition(config: TrainConfig, condition: Mapping[str, object], source: str) -> TrainConfig:
    """The configuration of one condition of a campaign."""
    base = {name: table for name, table in config.model_dump(by_alias=True).items() if name not in OPTIONAL_SECTIONS}
    base["training"]["epochs"] = 0.0  # a campaign counts steps
    return build_config(base, dict(condition_overrides(condition)), source)


def override(config: TrainConfig, overrides: Mapping[str, object], source: str) -> TrainConfig:
    """The configuration with `{"section.key": value}` overrides, validated; `source` is its name in errors."""
    return build_config(_tables_of(config), overrides, source)


def _tables_of(config: TrainConfig) -> Tables:
    return {name: table for name, table in config.model_dump(by_alias=True).items() if table is not None}


def find_notes(config: TrainConfig, given: Collection[str] = ()) -> list[Note]:
    """Options that are set, or `given` as flags, and not used.

    An option that a campaign sets for all runs is used if one of them uses it.
    """
    given = resolve_flags(given, config.kind).values()
    notes = list(unused_options(config, given))
    runs: list[tuple[set[str], list[Note]]] = []
    for index, condition in enumerate(config.campaign.conditions if config.campaign is not None else ()):
        found = list(unused_options(build_condition(config, condition, "the campaign"), given))
        overridden = {options_by_path()[path].where for path, _ in condition_overrides(condition)}
        runs.append((overridden, found))
        notes += [Note(f"[campaign] conditions[{index}]: {n.where}", n.reason) for n in found if n.where in overridden]
    shared = dict.fromkeys(note for overridden, found in runs for note in found if note.where not in overridden)
    notes += [note for note in shared if all(note.where in overridden or note in found for overridden, found in runs)]
    return list({note.where: note for note in reversed(notes)}.values())[::-1]


def dump_config(config: TrainConfig) -> str:
    """The configuration as TOML, which loads to an equal one."""
    return format_toml(_tables_of(config))


def _apply_overrides(tables: Tables, overrides: Mapping[str, object]) -> tuple[Tables, list[ConfigIssue]]:
    """A copy of the tables, two levels deep, with overrides applied."""
    merged = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    issues = []
    paths = resolve_flags(overrides, _kind_of(tables))
    for given, value in overrides.items():
        path = paths[given]
        section, _, key = path.partition(".")
        if path not in options_by_path():
            issues.append(_unknown_key(section, key or path))
        elif section in OPTIONAL_SECTIONS and section not in merged:
            meant = find_synonym(key)
            hint = f"Did you mean {meant.where} ({meant.flag})?" if meant else f"Try: add a [{section}] table"
            issues.append(option_issue(path, "was set, but the file has no such table.", hint, (section,)))
        elif isinstance(merged.setdefault(section, {}), dict):
            merged[section][key] = value
    return merged, issues


def _kind_of(tables: Tables) -> str:
    """As TrainConfig.kind, of tables that have not been validated."""
    squeeze = tables.get("squeeze")
    if "campaign" in tables:
        return "campaign"
    return "squeeze" if isinstance(squeeze, dict) and squeeze.get("adapter_path") else "train"


def _drop_too_deep(tables: Tables) -> Iterator[ConfigIssue]:
    """Remove values nested so deeply that printing, comparing or dumping them would overflow the stack."""
    text = f"is nested more than {MAX_DEPTH} levels deep."
    for section, table in list(tables.items()):
        if not isinstance(table, dict):
            if is_too_deep(table):
                del tables[section]
                yield ConfigIssue(f"[{_show_key(section)}]", text, tables=(section,))
            continue
        for key in [key for key, value in table.items() if is_too_deep(value)]:
            del table[key]
            yield ConfigIssue(f"[{_show_key(section)}] {_show_key(key)}", text, tables=(section,))


def _drop_removed(tables: Tables) -> None:
    """Drop removed options that have their former default, as the saved configurations of earlier runs do."""
    for (section, key), (default, _) in REMOVED.items():
        table = tables.get(section)
        if isinstance(table, dict) and table.get(key) == default:
            del table[key]


def _validate(tables: Tables, known: list[ConfigIssue]) -> tuple[TrainConfig, list[ConfigIssue]]:
    """The configuration, and all its issues including those already known."""
    config, invalid = _check_types(tables)
    issues = known + invalid
    return config, issues + find_issues(config, issues)


def _check_types(tables: Tables) -> tuple[TrainConfig, list[ConfigIssue]]:
    """Check keys, types and bounds; invalid options keep their defaults, so that the rules can check the rest."""
    try:
        return _parse(tables), []
    except ValidationError as error:
        # One issue per option: the first error in a list is enough.
        first: dict[Location, ErrorDetails] = {}
        for detail in error.errors(include_url=False):
            first.setdefault(tuple(detail["loc"][:2]), detail)
        remaining = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
        for location in first:
            _drop(remaining, location)
        return _parse(remaining), list(_explain_all(first.values()))


def _parse(tables: Tables) -> TrainConfig:
    # An absent table is given as an empty one: calling its default factory would build its model a second time.
    present: Tables = {name: {} for name in TrainConfig.model_fields if name not in OPTIONAL_SECTIONS} | tables
    # by_name=False: a TOML key is the alias alone, `from` and not `from_`.
    return TrainConfig.model_validate(present, by_alias=True, by_name=False)


def _drop(tables: Tables, location: Location) -> None:
    name = str(location[0])
    section = tables.get(name)
    if len(location) == 1 or not isinstance(section, dict):
        tables.pop(name, None)
    else:
        section.pop(location[1], None)


def _check_conditions(config: TrainConfig, tables: Tables, known: frozenset[ConfigIssue]) -> Iterator[ConfigIssue]:
    """Every condition is a valid run, so that a campaign does not fail at its last one."""
    base = {name: table for name, table in tables.items() if name not in OPTIONAL_SECTIONS}
    for index, condition in enumerate(config.campaign.conditions if config.campaign is not None else ()):
        merged, _ = _apply_overrides(base, dict(condition_overrides(condition)))
        for issue in _validate(merged, [])[1]:
            if issue not in known:
                yield replace(issue, where=f"[campaign] conditions[{index}]: {issue.where}")


def _explain_all(details: Iterable[ErrorDetails]) -> Iterator[ConfigIssue]:
    for count, detail in enumerate(details):
        location = tuple(detail["loc"])
        if count < MAX_ISSUES:
            yield _explain(location, detail)
        else:
            yield ConfigIssue(".".join(str(part) for part in location[:2]), "is wrong.", tables=(str(location[0]),))


def _explain(location: Location, detail: ErrorDetails) -> ConfigIssue:
    """A pydantic error as a sentence with table, key, value and a suggestion."""
    kind, value = detail["type"], detail["input"]
    section = str(location[0])
    if len(location) == 1:
        if kind == "extra_forbidden":
            return _unknown_section(section, value)
        hint = f"Try: [{section}], with single brackets" if _is_list_of_tables(value) else f"Try: [{section}]"
        return ConfigIssue(f"[{section}]", f"must be a table, got {show_value(value)}.", hint, (section,))
    option = options_by_path().get(f"{section}.{location[1]}")
    if option is None:
        return _unknown_key(section, str(location[1]))
    inside = "".join(f"[{part}]" if isinstance(part, int) else f".{_show_key(str(part))}" for part in location[2:])
    text, hint = f"{_requirement(kind, detail)}, got {show_value(value)}.", _suggest_value(option, value)
    if kind == "extra_forbidden":
        close = get_close_matches(str(location[-1])[:_SHOWN], option.element_keys, n=1)
        text = "is unknown."
        hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(option.element_keys)}."
    return ConfigIssue(f"{option.where}{inside}", text, hint, (section,))


def _suggest_value(option: Option, value: object) -> str:
    if option.type_name.startswith("table") and isinstance(value, str) and "=" in value:
        return 'Texts inside need quotes: { key = "value" }'
    return f"Try: {option.key} = {format_value(_convert(option, value))}"


def _convert(option: Option, value: object) -> object:
    """The value as a number, bool or list, if it is one in quotes or of another type; otherwise the default."""
    if isinstance(value, {"list[str]": (str,), "list[int]": (str, int)}.get(option.type_name, ())):
        # As other programs take lists: a,b
        value = [item for part in str(value).split(",") if (item := part.strip(" []'\""))]
    elif option.type_name not in ("int", "float", "bool") or isinstance(value, bool):
        return option.default
    try:
        table = section_type(option.section).model_validate({option.key: value}, strict=False)
    except ValidationError:
        return option.default
    return table.model_dump(by_alias=True)[option.key]


def _requirement(kind: str, detail: ErrorDetails) -> str:
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
        homes = [option for option in all_options() if option.key == section][:1]
        hint = f"Did you mean {homes[0].where}?" if homes else "Options stand inside a [table]."
        tables = tuple(option.section for option in homes)
        return ConfigIssue(f"unknown option {_show_key(section)}", "outside any table.", hint, tables)
    close = tuple(get_close_matches(section[:_SHOWN], TrainConfig.model_fields, n=1))
    hint = f"Did you mean [{close[0]}]?" if close else f"Tables: {', '.join(TrainConfig.model_fields)}."
    return ConfigIssue(f"unknown table [{_show_key(section)}].", "", hint, close)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _unknown_key(section: str, key: str) -> ConfigIssue:
    if (section, key) in REMOVED:
        return ConfigIssue(f"[{section}] {key}", "was removed.", REMOVED[section, key][1], (section,))
    where, hint = f"unknown option [{_show_key(section)}] {_show_key(key)}.", "`retrain help` lists every option."
    meant = _find_meant(section, key)
    if meant is not None:
        hint = f"Did you mean {meant.key if meant.section == section else meant.where}?"
        return ConfigIssue(where, "", hint, (section, meant.section))
    if key in TrainConfig.model_fields:
        return ConfigIssue(where, "", f"Did you mean the table [{key}]?", (section, key))
    return ConfigIssue(where, "", hint, (section,))


def _find_meant(section: str, key: str) -> Option | None:
    """The option most likely meant: a synonym or the same key, then a similar key in the same table, then anywhere."""
    options = all_options()
    synonym = find_synonym(f"{section}.{key}")
    exact = [option for option in options if option.key == key]
    # A [squeeze] or [campaign] table that was not asked for would turn the file into something else.
    is_common = any(option.section not in OPTIONAL_SECTIONS for option in exact)
    if synonym is not None and (synonym.section == section or not is_common):
        return synonym
    if exact or key in TrainConfig.model_fields:
        return exact[0] if exact else None
    own = [option for option in options if option.section == section]
    # A wrong option of another table would be worse than none.
    others = [option for option in options if option.section not in OPTIONAL_SECTIONS]
    for candidates, cutoff in ((own, 0.6), (others, 0.8)):
        close = get_close_matches(key[:_SHOWN], [option.key for option in candidates], n=1, cutoff=cutoff)
        if close:
            return next(option for option in candidates if option.key == close[0])
    return None


def _show_key(key: str) -> str:
    """A key as TOML spells it, so that control characters and unusual spaces are visible."""
    text = format_key(key)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
