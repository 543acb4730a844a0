"""Generated files: the default TOML, the JSON schema, tables in the docs, parts of the manual.

`python -m retrain.cli.sync` rewrites stale files; with `--check` it only lists them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill

import click

from retrain.cli import COMMANDS, app
from retrain.config.flags import ConfigFlag
from retrain.config.options import Option, all_options, section_type
from retrain.config.reference import SCHEMA_FILE, default_toml, describe, docs_tables, schema_text
from retrain.config.toml import format_value
from retrain.errors import ConfigError
from retrain.manual import SOURCE

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
# Longer defaults are tables or lists of tables and are left out.
_LONGEST_DEFAULT = 60


def fill_manual(text: str) -> str:
    """The manual's source with every generated block replaced."""
    generators = {
        "commands": commands_block,
        "options": options_block,
        "troubleshooting": troubleshooting_block,
        "glossary": glossary_block,
    }
    return _fill(text, generators)


def _fill(text: str, generators: Mapping[str, Callable[[], str]]) -> str:
    return _BLOCK.sub(lambda found: f"{found[1]}\n{generators[found[2]]()}\n{found[3]}", text)


def troubleshooting_block() -> str:
    """The sections of the docs page, one level of headings lower."""
    return _copy_page("troubleshooting", lambda text: "\n".join(f"### {part}" for part in text.split("\n## ")[1:]))


def glossary_block() -> str:
    """The docs page without its title."""
    return _copy_page("glossary", lambda text: text.partition("\n\n")[2])


def _copy_page(name: str, convert: Callable[[str], str]) -> str:
    """A docs page for the manual, without links. The installed package has only the result."""
    page = Path(__file__).parents[2] / "docs" / f"{name}.md"
    if not page.exists():
        found = next(found for found in _BLOCK.finditer(SOURCE.read_text(encoding="utf-8")) if found[2] == name)
        return found[0].removeprefix(found[1] + "\n").removesuffix("\n" + found[3])
    return _LINK.sub(r"\1", convert(page.read_text(encoding="utf-8")))


def commands_block() -> str:
    """One heading per command, one definition per flag of the command itself."""
    return "\n".join(line for name in COMMANDS for line in _describe_command(name))


def _describe_command(name: str) -> Iterator[str]:
    command = app.get_command(click.Context(app), name)
    assert command is not None, name
    with click.Context(command) as context:
        arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
    yield f"### retrain {' '.join([name, *arguments])}\n\n{COMMANDS[name][1]}\n"
    flags = [one for one in command.params if isinstance(one, click.Option)]
    takes_every_option = any("--lr" in flag.opts for flag in flags)
    specific = [flag for flag in flags if not (takes_every_option and _SCHEMA_FLAGS.intersection(flag.opts))]
    for flag in specific:
        assert flag.help, f"retrain {name} {flag.opts[0]} has no help"
        yield f"`{'/'.join([*flag.opts, *flag.secondary_opts])}`{_describe_choices(flag)}\n: {flag.help}\n"
    if takes_every_option:
        yield f"{_describe_schema_flags(command)}\n"


def _describe_schema_flags(command: click.Command) -> str:
    """Which flags of training a command takes: those that its help lists, or all."""
    listed = [one.opts[0] for one in command.params if isinstance(one, ConfigFlag) and one.in_help]
    if 0 < len(listed) < len(_SCHEMA_FLAGS):
        text = f"It also accepts these training flags: {', '.join(f'`{flag}`' for flag in listed)}."
        return fill(text, 120, break_on_hyphens=False)
    return "It also accepts the training flags, listed under Options."


def _describe_choices(flag: click.Option) -> str:
    """The choices, unless a metavar replaces them."""
    if not isinstance(flag.type, click.Choice) or flag.metavar:
        return ""
    return f" {'|'.join(map(str, flag.type.choices))}"


def options_block() -> str:
    """One heading per TOML table, one definition per option."""
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


def generated_files(root: Path) -> dict[Path, str]:
    """Every generated file of the repository at `root` with its expected text."""
    files = {root / "retrain.toml": default_toml(), root / SCHEMA_FILE: schema_text()}
    page = root / "docs" / "configuration.md"
    if page.exists():
        files[page] = _fill(page.read_text(encoding="utf-8"), {"options": docs_tables})
    manual = root / SOURCE.relative_to(Path(__file__).parents[2])
    if manual.exists():
        files[manual] = fill_manual(manual.read_text(encoding="utf-8"))
    return files


def main(arguments: Sequence[str]) -> int:
    """Rewrite and list stale files; with `--check` only list them, and return 1 if there are any."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        raise ConfigError(f"{root} is not a checkout of retrain; there is nothing to regenerate.")
    files = generated_files(root)
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    check = "--check" in arguments
    for path in stale:
        if not check:
            path.write_text(files[path], encoding="utf-8")
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(root)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
