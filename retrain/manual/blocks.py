"""The generated parts of the manual: commands from the command table, options from the schema.

Apart from the reader because it imports the schema and every command, which reading the manual must not wait for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import click

from retrain.cli import COMMANDS, app
from retrain.config.options import Option, all_options, section_type
from retrain.config.reference import describe
from retrain.config.toml import format_value

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
# A longer default is a table or a list of tables, which a term has no room for.
_LONGEST_DEFAULT = 60


def fill_blocks(text: str) -> str:
    """The manual's source with every generated block written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{GENERATORS[found[2]]()}\n{found[3]}", text)


def commands_block() -> str:
    """One heading for each command, one definition for each flag of its own."""
    return "\n".join(line for name in COMMANDS for line in _describe_command(name))


def _describe_command(name: str) -> Iterator[str]:
    command = app.get_command(click.Context(app), name)
    assert command is not None, name
    with click.Context(command) as context:
        arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
    yield f"### retrain {' '.join([name, *arguments])}\n\n{COMMANDS[name][1]}\n"
    flags = [one for one in command.params if isinstance(one, click.Option)]
    own = [flag for flag in flags if not _SCHEMA_FLAGS.intersection(flag.opts)]
    for flag in own:
        assert flag.help, f"retrain {name} {flag.opts[0]} has no help"
        yield f"`{'/'.join([*flag.opts, *flag.secondary_opts])}`{_describe_choices(flag)}\n: {flag.help}\n"
    if len(own) < len(flags):
        yield "It also takes the flags of a training run, listed under Options.\n"


def _describe_choices(flag: click.Option) -> str:
    """The choices, unless a metavar stands for them because they are too many for a line."""
    if not isinstance(flag.type, click.Choice) or flag.metavar:
        return ""
    return f" {'|'.join(map(str, flag.type.choices))}"


def options_block() -> str:
    """One heading for each table of the TOML, one definition for each option."""
    lines = []
    section = ""
    for option in all_options():
        if option.section != section:
            section = option.section
            lines.append(f"### [{section}]\n\n{section_type(section).__doc__}\n")
        lines.append(f"`{option.key}`, {_describe_flag(option)} ({_describe_value(option)})\n: {describe(option)}\n")
    return "\n".join(lines)


def _describe_flag(option: Option) -> str:
    return f"`{option.flag}/--no-{option.flag[2:]}`" if option.type_name == "bool" else f"`{option.flag}`"


def _describe_value(option: Option) -> str:
    default = format_value(option.default)
    return f"{option.type_name}, `{default}`" if len(default) <= _LONGEST_DEFAULT else option.type_name


_SCHEMA_FLAGS = {option.flag for option in all_options()}
GENERATORS: dict[str, Callable[[], str]] = {"commands": commands_block, "options": options_block}
