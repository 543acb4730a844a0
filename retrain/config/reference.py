"""Text generated from the schema: the default file, starter files, docs tables, help, the JSON schema."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator

from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options, options_by_path, section_type
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_key, format_value
from retrain.errors import ConfigError
from retrain.plugins import REGISTRIES
from retrain.types import JsonObject

SCHEMA_FILE = "retrain.schema.json"
"""Name of the JSON schema, which is next to a TOML file: editors resolve its `#:schema` line relative to the file."""

_SCHEMA_LINE = f"#:schema ./{SCHEMA_FILE}"
_LONGEST_LINE = 120
_WIDEST_ASSIGNMENT = 44
_LONGEST_DEFAULT = 60
_LONGEST_LIST = 4


@dataclass(frozen=True)
class Template:
    """A starter file: its purpose, and the options it contains, by `section.key`."""

    summary: str
    values: Mapping[str, object]


def _read_template(name: str) -> Template:
    text = (Path(__file__).with_name("templates") / f"{name}.toml").read_text(encoding="utf-8")
    values = {
        f"{section}.{key}": tuple(value) if isinstance(value, list) else value
        for section, table in tomllib.loads(text).items()
        for key, value in table.items()
    }
    return Template(text.partition("\n")[0].removeprefix("# "), values)


TEMPLATES = {name: _read_template(name) for name in ("demo", "quickstart", "standard", "campaign", "squeeze")}
"""Starter files, from `templates/NAME.toml`: the first line is the summary."""


def default_toml() -> str:
    """The default configuration with a comment per option; tables that change the kind of run are commented out."""
    blocks = [
        f"{_SCHEMA_LINE}\n# Every option with its default. A file needs only the lines that differ; "
        "`retrain init` writes a short one."
    ]
    for section in TrainConfig.model_fields:
        lines = _section_lines(section, {o.key: o.default for o in all_options() if o.section == section})
        if section in OPTIONAL_SECTIONS:
            lines = [f"# {line}".rstrip() for line in lines]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def starter(template: str, changes: Mapping[str, object] | None = None) -> str:
    """The text of a starter file; `changes` replace or add options, by `section.key`."""
    if template not in TEMPLATES:
        raise ConfigError(f"there is no template {template!r}.  Templates: {', '.join(TEMPLATES)}.")
    values = {**TEMPLATES[template].values, **(changes or {})}
    blocks = [f"{_SCHEMA_LINE}\n# {TEMPLATES[template].summary}\n# Options left out keep their defaults: retrain help."]
    for section in TrainConfig.model_fields:
        chosen = {o.key: values[o.path] for o in all_options() if o.section == section and o.path in values}
        if chosen:
            blocks.append("\n".join(_section_lines(section, chosen)))
    return "\n\n".join(blocks) + "\n"


def write_with_schema(path: Path, text: str) -> None:
    """Write a configuration, and next to it the schema that its first line names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    (path.parent / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")


def describe(option: Option) -> str:
    """The description of an option, with its choices if it does not mention them."""
    names = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in option.choices]
    if all(name in option.description for name in names):
        return option.description
    listed = ", ".join(name or '""' for name in names)
    return f"{option.description} One of {listed}."


def _section_lines(section: str, values: Mapping[str, Any]) -> list[str]:
    """One table; lists of tables come last, as TOML requires."""
    tables = {key: value for key, value in values.items() if value and _is_list_of_tables(section, key)}
    texts = {key: f"{format_key(key)} = {format_value(value)}" for key, value in values.items() if key not in tables}
    width = max((len(text) for text in texts.values() if len(text) <= _WIDEST_ASSIGNMENT), default=0)
    lines = [f"# {section_type(section).__doc__}", f"[{section}]"]
    for key, text in texts.items():
        comment = describe(options_by_path()[f"{section}.{key}"])
        line = f"{text:<{width}}  # {comment}"
        lines += [line] if len(line) <= _LONGEST_LINE else [f"# {comment}", text]
    for key, rows in tables.items():
        lines += ["", f"# {describe(options_by_path()[f'{section}.{key}'])}"]
        for row in rows:
            lines += [
                f"[[{section}.{format_key(key)}]]",
                *(f"{format_key(k)} = {format_value(v)}" for k, v in row.items()),
            ]
    return lines


def _is_list_of_tables(section: str, key: str) -> bool:
    return options_by_path()[f"{section}.{key}"].type_name == "list of tables"


def json_schema() -> JsonObject:
    """The JSON schema of a configuration file, without references, which some editors do not support."""
    generated = TrainConfig.model_json_schema(by_alias=True)
    definitions = generated["$defs"]
    sections = {}
    for name in TrainConfig.model_fields:
        section = _inline(definitions[section_type(name).__name__], definitions)
        for option in all_options():
            if option.section == name:
                _widen(section["properties"][option.key], option)
        sections[name] = section
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "retrain configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
    }


def schema_text() -> str:
    """The JSON schema as text."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _inline(node: Any, definitions: Mapping[str, object]) -> Any:
    """A copy without references, and without titles, which repeat the key."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    if "properties" in node:
        properties = {key: _inline(item, definitions) for key, item in node["properties"].items()}
        return {"type": "object", "description": node["description"], "additionalProperties": False} | {
            "properties": properties
        }
    kept = {key: item for key, item in node.items() if key != "title"}
    return {key: item if key == "default" else _inline(item, definitions) for key, item in kept.items()}


def _widen(node: JsonObject, option: Option) -> None:
    """Add what the type does not express: suggested names, and tables given as JSON strings."""
    if option.kind:
        del node["type"]
        node["anyOf"] = [{"enum": list(REGISTRIES[option.kind].builtins)}, {"type": "string"}]
    elif any(isinstance(rule, BeforeValidator) for rule in option.field.metadata):
        node["type"] = [node["type"], "string"]


def docs_tables() -> str:
    """A Markdown table for each section."""
    blocks = []
    for section in TrainConfig.model_fields:
        rows = [
            f"| `{o.key}`<br>`{o.flag}` | {o.type_name}<br>`{_short_default(o)}` | {_escape(describe(o))} |"
            for o in all_options()
            if o.section == section
        ]
        head = ["| Key, flag | Type, default | What it does |", "|---|---|---|"]
        blocks.append("\n".join([f"### `[{section}]`", "", section_type(section).__doc__ or "", "", *head, *rows]))
    return "\n\n".join(blocks) + "\n"


def _shown_default(option: Option) -> str:
    text = format_value(option.default)
    return text if len(text) <= _LONGEST_DEFAULT else "[…]"


def _short_default(option: Option) -> str:
    """The default for a narrow column: of a long list, only the first item."""
    value = option.default
    if isinstance(value, tuple) and len(value) > _LONGEST_LIST and not isinstance(value[0], dict):
        return f"[{format_value(value[0])}, …]"
    return _shown_default(option)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[")


def help_text(commands: Mapping[str, str], only: Sequence[Option] = ()) -> str:
    """The full reference: usage, commands (name and summary), options by table. `only` limits it to these options."""
    blocks = [] if only else [_usage(commands)]
    for section, options in groupby(only or all_options(), key=lambda option: option.section):
        lines = [f"[{section}]  {section_type(section).__doc__}"]
        for option in options:
            flag = f"{option.flag}/--no-{option.flag[2:]}" if option.type_name == "bool" else option.flag
            kind = "" if option.type_name == "bool" else f" {option.type_name.upper().replace(' ', '_')}"
            lines += [f"  {flag + kind:<46}  {option.key} = {_shown_default(option)}", f"      {describe(option)}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _usage(commands: Mapping[str, str]) -> str:
    width = max(len(name) for name in commands)
    return "\n".join(
        [
            "Usage",
            "  retrain [CONFIG.toml] [--flags]   train; without CONFIG ./retrain.toml is used",
            "  retrain COMMAND [--help]",
            "",
            "Commands",
            *(f"  {name:<{width}}  {summary}" for name, summary in commands.items()),
            "",
            "Options",
            "  A line shows the flag with its type, then the key of the TOML with its default.",
            "  A flag overrides the file. Each also has its long form, e.g. --training.lr 1e-4; lists and tables are",
            "  written as in TOML, e.g. --args '{split = \"train\"}'.",
        ]
    )
