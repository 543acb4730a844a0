"""`retrain init-plugin`: write a plug-in to start from, with its test, and say how a configuration uses it."""

from __future__ import annotations

import keyword
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

import click

from retrain.cli.scaffolds import SCAFFOLDS, Scaffold
from retrain.config.toml import format_value
from retrain.errors import ConfigError


@click.command("init-plugin", short_help="Write a plug-in to start from.")
@click.option(
    "--kind",
    required=True,
    metavar="KIND",
    type=click.Choice(list(SCAFFOLDS)),
    help=f"Which part it replaces: {', '.join(SCAFFOLDS)}.",
)
@click.option("--name", required=True, metavar="NAME", help="Name of the module.")
@click.option("--with-test", is_flag=True, help="Write a test as well; it passes as it stands.")
@click.option(
    "--output", default=".", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to (default: .)."
)
def command(kind: str, name: str, with_test: bool, output: Path) -> None:
    """Write NAME.py, a plug-in that works as it stands, and print the lines of TOML that use it."""
    scaffold = SCAFFOLDS[kind]
    files = {output / f"{name}.py": scaffold.module}
    if with_test:
        files[output / f"test_{name}.py"] = scaffold.test
    _check_name(name)
    present = [path for path in files if path.exists()]
    if present:
        raise ConfigError(f"{present[0]} exists and was left as it is.  Try: another --name or --output.")
    _check_is_free(name)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(Template(text).substitute(name=name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written to: {error.strerror}.") from error
    for path in files:
        click.echo(f"Wrote {path}")
    click.echo(_next_steps(kind, scaffold, name, output, with_test))


def _check_name(name: str) -> None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(f"--name {name!r} cannot be a module's name.  Try: letters, digits and _, e.g. my_plugin")


def _check_is_free(name: str) -> None:
    """A module of the same name on Python's own path could be imported in the plug-in's place."""
    taken = PathFinder.find_spec(name)
    if name in sys.stdlib_module_names or taken is not None:
        where = taken.origin if taken is not None else "part of Python"
        raise ConfigError(f"--name {name!r} is already a module ({where}).  Try: --name my_{name}")


def _next_steps(kind: str, scaffold: Scaffold, name: str, output: Path, with_test: bool) -> str:
    toml = Template("\n".join(scaffold.toml)).substitute(name=name)
    if output.resolve() != Path.cwd():
        toml += f"\n\n[plugins]\nsearch_paths = {format_value([str(output)])}"
    lines = ["", "In your configuration:", "", toml, ""]
    if with_test:
        lines += [f"Its test:  python -m pytest {output / f'test_{name}.py'}"]
    lines += [
        "To ship it in a package of your own, so that its name alone is enough, in that package's pyproject.toml:",
        "",
        f'[project.entry-points."retrain.{kind}"]',
        f'{name} = "{name}:{scaffold.attribute}"',
    ]
    return "\n".join(lines)
