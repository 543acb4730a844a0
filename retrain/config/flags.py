"""The flags, derived from the schema: one for every option, under its short name and as `--section.key`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from retrain.config.options import Option, all_options
from retrain.config.toml import parse_toml
from retrain.errors import ConfigError
from retrain.plugins import REGISTRIES

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def click_options() -> list[click.Option]:
    """One click option for each option of the schema; None means that it was not given."""
    return [_click_option(option) for option in all_options()]


def overrides_from(parameters: Mapping[str, object]) -> dict[str, object]:
    """The flags that were given, as `{"section.key": value}` in the types that TOML would have produced."""
    given = ((option, parameters[_name(option)]) for option in all_options())
    return {option.path: _parse(option, value) for option, value in given if value is not None}


def _name(option: Option) -> str:
    return f"{option.section}__{option.key}"


def _click_option(option: Option) -> click.Option:
    spellings = dict.fromkeys([option.flag, f"--{option.path}"])
    if option.type_name == "bool":
        declarations = [f"{spelling}/--no-{spelling[2:]}" for spelling in spellings]
        return click.Option([_name(option), *declarations], default=None, help=option.description)
    return click.Option(
        [_name(option), *spellings],
        type=_Value(option),
        default=None,
        metavar=option.type_name.upper().replace(" ", "_"),
        help=option.description,
    )


class _Value(click.ParamType[str]):
    """Accepts any text, which the schema validates; provides choices for shell completion."""

    name = "value"

    def __init__(self, option: Option) -> None:
        self.option = option

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the values of the option, or file names if it is a path."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  (only a shell that completes needs it)

        if self.option.facets.path:
            return [CompletionItem(incomplete, type="file")]
        choices = self.option.choices or (REGISTRIES[self.option.kind].names() if self.option.kind else ())
        return [CompletionItem(str(c)) for c in choices if str(c).startswith(incomplete)]


def _parse(option: Option, value: object) -> object:
    """The value of a flag: text for string options; otherwise parsed as TOML, and left as text if that fails."""
    if not isinstance(value, str) or option.type_name == "str":
        return value
    try:
        table = parse_toml(f"value = {value}", option.flag)
    except ConfigError:
        return value
    # A line break in the text would start a second key, which must not go unnoticed.
    return table["value"] if len(table) == 1 else value
