"""How a parameter of GRPOConfig is declared, checked and shown: one declaration a parameter, in its dataclass field.

The table of docs/grpo.md is printed from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retrain.errors import ConfigIssue


@dataclass(frozen=True)
class Declared:
    """What a parameter is, beside its name, type and default."""

    group: str
    twin: str
    """The TOML option that it becomes, or what stands in for one."""
    does: str
    tested_by: str
    """Test functions by name; `tests/house` looks for them."""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """Like low, but the bound itself is out."""
    choices: tuple[Any, ...] = ()
    shown: str = ""
    """The default in the table, where it is not a value."""


class Help(str):
    """The help text of a field, which carries its declaration: parsers of dataclasses take no other metadata."""

    declared: Declared


def parameter(default: Any, declared: Declared) -> Any:
    """A dataclass field that carries its declaration."""
    text = Help(declared.does)
    text.declared = declared
    return dataclasses.field(default=default, metadata={"help": text})


def is_declared(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is one of ours, and not only inherited."""
    return isinstance(field.metadata.get("help"), Help)


def declarations(config: type) -> dict[str, Declared]:
    """Every declared parameter by name, in the order of its class; the fields begin with the inherited ones."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    return {
        name: fields[name].metadata["help"].declared for name in config.__annotations__ if is_declared(fields[name])
    }


def defaults(config: type) -> dict[str, Any]:
    """The default of every field."""
    values = {}
    for field in dataclasses.fields(config):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        values[field.name] = made
    return values


def check_values(config: Any, hints: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """A problem for each declared parameter of the wrong type or out of range."""
    usual = defaults(type(config))
    for name, declared in declarations(type(config)).items():
        value = vars(config)[name]
        if (value == usual[name] and type(value) is type(usual[name])) or value is usual[name]:
            continue
        text = _wrong_type(value, hints[name]) or _out_of_range(value, declared)
        if text:
            yield ConfigIssue(name, f"{text}, got {_show(value)}.", f"Try: {name}={_show(usual[name])}")


def _wrong_type(value: object, hint: Any) -> str:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return "" if any(_is_a(value, one) for one in allowed) else f"must be {' or '.join(map(_name, allowed))}"


def _is_a(value: object, hint: Any) -> bool:
    if hint is types.NoneType or hint is None:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_is_a(item, typing.get_args(hint)[0]) for item in value)
    return isinstance(value, typing.get_origin(hint) or hint)


def _name(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}
    if typing.get_origin(hint) is list:
        return "a list of text" if typing.get_args(hint)[0] is str else "a list of numbers"
    return words.get(hint, "a dict" if (typing.get_origin(hint) or hint) is dict else str(hint))


def _out_of_range(value: object, declared: Declared) -> str:
    if declared.choices and value not in declared.choices:
        return f"must be one of {', '.join(map(repr, declared.choices))}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if isinstance(value, list):
        numbers = [item for item in value if isinstance(item, float)]
        return "" if all(map(math.isfinite, numbers)) else "must hold finite numbers"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    if declared.above is not None and value <= declared.above:
        return f"must be > {declared.above:g}"
    if declared.low is not None and value < declared.low:
        return f"must be >= {declared.low:g}"
    return f"must be <= {declared.high:g}" if declared.high is not None and value > declared.high else ""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def docs_table(config: type) -> str:
    """The whole table in Markdown, a heading a group."""
    usual, blocks = defaults(config), []
    declared = declarations(config)
    head = ["| Parameter | Default | TOML twin | What it does | Tested by |", "|---|---|---|---|---|"]
    for group in dict.fromkeys(each.group for each in declared.values()):
        rows = [
            f"| `{name}` | `{each.shown or _show(usual[name])}` | {_cell(each.twin)} | {_cell(each.does)} "
            f"| {', '.join(f'`{test}`' for test in each.tested_by.split())} |"
            for name, each in declared.items()
            if each.group == group
        ]
        blocks.append("\n".join([f"### {group}", "", *head, *rows]))
    return "\n\n".join(blocks) + "\n"


def _cell(text: str) -> str:
    # Between backticks a bracket begins no link, and a backslash would show.
    parts = [part if at % 2 else part.replace("[", "\\[") for at, part in enumerate(text.split("`"))]
    return "`".join(parts).replace("|", "\\|")
