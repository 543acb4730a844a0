"""The generated parts of the manual: commands from the command table, options from the schema.

Apart from the reader because it imports the schema, which reading the manual must not wait for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from retrain.cli import COMMANDS
from retrain.config.options import Option, all_options, section_type
from retrain.config.toml import format_value

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
# A longer default is a table or a list of tables, which a term has no room for.
_LONGEST_DEFAULT = 60


def fill_blocks(text: str) -> str:
    """The manual's source with every generated block written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{GENERATORS[found[2]]()}{found[3]}", text)


def commands_block() -> str:
    """One definition for each command."""
    return "\n".join(f"`retrain {name}`\n: {summary}\n" for name, (_, summary) in COMMANDS.items())


def options_block() -> str:
    """One heading for each table of the TOML, one definition for each option."""
    lines = []
    section = ""
    for option in all_options():
        if option.section != section:
            section = option.section
            lines.append(f"### [{section}]\n\n{section_type(section).__doc__}\n")
        lines.append(f"`{option.key}`, {_describe_flag(option)} ({_describe_value(option)})\n: {option.description}\n")
    return "\n".join(lines)


def _describe_flag(option: Option) -> str:
    return f"`{option.flag}/--no-{option.flag[2:]}`" if option.type_name == "bool" else f"`{option.flag}`"


def _describe_value(option: Option) -> str:
    kind = " | ".join(map(str, option.choices)) if option.choices and option.choices[0] != "" else option.type_name
    default = format_value(option.default)
    return f"{kind}; default `{default}`" if len(default) <= _LONGEST_DEFAULT else kind


GENERATORS: dict[str, Callable[[], str]] = {"commands": commands_block, "options": options_block}
