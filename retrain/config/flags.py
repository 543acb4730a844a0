"""The flags, derived from the schema: one for every option, under its short name and as `--section.key`."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrain.config.load import load_config
from retrain.config.options import Option, all_options, options_by_path, replaced_paths
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_value, parse_toml
from retrain.errors import ConfigError, ConfigIssue
from retrain.plugins import REGISTRIES
from retrain.runtime.text import plural

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def click_options(listed: Collection[str] | None = None) -> list[ConfigFlag]:
    """One click option for each option of the schema; None means that it was not given.

    `listed`: the paths that --help lists, by default all. The others work and complete in the same way.
    """
    return [_click_option(option, listed is None or option.path in listed) for option in all_options()]


def overrides_from(parameters: Mapping[str, object]) -> dict[str, object]:
    """The flags that were given, as `{"section.key": value}` in the types that TOML would have produced."""
    given = ((option, parameters[_name(option)]) for option in all_options())
    return {option.path: _parse(option, value) for option, value in given if value is not None}


def load_with_flags(path: Path | None, overrides: Mapping[str, object], strict: bool = False) -> TrainConfig:
    """`load_config` for overrides that are flags."""
    with naming_flags(overrides):
        return load_config(path, overrides, strict)


@contextmanager
def naming_flags(overrides: Mapping[str, object]) -> Iterator[None]:
    """Report what is wrong with a flag under its name."""
    try:
        yield
    except ConfigError as error:
        issues = tuple(_name_flag(issue, overrides) for issue in error.issues)
        renamed = sum(issue not in error.issues for issue in issues)
        if not renamed:
            raise
        only = f"the command line has {plural(renamed, 'problem')}:"
        raise ConfigError(only if renamed == len(issues) else str(error).partition("\n")[0], issues) from error


def _name_flag(issue: ConfigIssue, overrides: Mapping[str, object]) -> ConfigIssue:
    """The issue with the flag that it is about, if any."""
    for path in overrides:
        option = options_by_path()[path]
        others = (replaced_paths(kind).get(path) for kind in ("campaign", "squeeze"))
        places = [option.where, *(options_by_path()[other].where for other in others if other)]
        if any(issue.where == place or issue.where.startswith((f"{place}[", f"{place}.")) for place in places):
            return replace(issue, where=f"{option.flag} ({issue.where})", hint=_as_flag(issue.hint, option))
    return issue


def _as_flag(hint: str, option: Option) -> str:
    """A hint that sets the option, as a shell takes it; other hints are unchanged."""
    before, assignment, value = hint.partition(f"Try: {option.key} = ")
    if not assignment or before or option.type_name == "bool":
        return hint
    if not option.type_name.startswith(("list", "table")):
        return f"Try: {option.flag} {value}"
    try:
        parse_toml(f"value = {value}", option.flag)
    except ConfigError:
        return hint  # it says more than a value
    return f"Try: {option.flag} {shlex.quote(value)}"


def _name(option: Option) -> str:
    return f"{option.section}__{option.key}"


class ConfigFlag(click.Option):
    """The flag of an option, which --help need not list; `hidden` of click would also disable its completion."""

    in_help = True

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The row of the help, or None."""
        return super().get_help_record(ctx) if self.in_help else None


def _click_option(option: Option, in_help: bool) -> ConfigFlag:
    flag = _make_flag(option)
    flag.in_help = in_help
    return flag


def _make_flag(option: Option) -> ConfigFlag:
    spellings = dict.fromkeys([option.flag, f"--{option.path}", f"--{option.path.replace('_', '-')}"])
    if option.type_name == "bool":
        declarations = [f"{spelling}/--no-{spelling[2:]}" for spelling in spellings]
        return ConfigFlag([_name(option), *declarations], default=None, help=option.description)
    # In `--overlap --log-dir x`, click would take the next flag for the value; no choice begins with a dash.
    without_value: dict[str, Any] = {"is_flag": False, "flag_value": _NO_VALUE} if option.choices else {}
    return ConfigFlag(
        [_name(option), *spellings],
        type=_Value(option),
        default=None,
        metavar=option.type_name.upper().replace(" ", "_"),
        help=option.description,
        **without_value,
    )


# Stands for a missing value; no argument can contain this character.
_NO_VALUE = "\0"


class _Value(click.ParamType[str]):
    """Accepts any text, which the schema validates; provides choices for shell completion."""

    name = "value"

    def __init__(self, option: Option) -> None:
        self.option = option

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, or an error that lists the choices if there is none."""
        if value == _NO_VALUE:
            *others, last = (
                choice if choice and isinstance(choice, str) else format_value(choice) for choice in self.option.choices
            )
            raise click.UsageError(f"{self.option.flag} needs a value: {', '.join(others)} or {last}", ctx)
        return value

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
