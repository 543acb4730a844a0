"""`retrain init-plugin`: write a plugin to start from, with its test, and print how a configuration uses it.

The files are `scaffolds/KIND.py.txt` and `scaffolds/test_KIND.py.txt`: `string.Template`s, where `$name` is the module.
"""

from __future__ import annotations

import keyword
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

import click

from retrain.config.toml import format_value
from retrain.errors import ConfigError

_FOLDER = Path(__file__).with_name("scaffolds")


@dataclass(frozen=True)
class Scaffold:
    """One kind of plugin: its name inside the module, and the lines of TOML that use it."""

    kind: str
    attribute: str
    toml: tuple[str, ...]

    @property
    def module(self) -> str:
        """A plugin that works unchanged."""
        return (_FOLDER / f"{self.kind}.py.txt").read_text(encoding="utf-8")

    @property
    def test(self) -> str:
        """A test that passes unchanged."""
        return (_FOLDER / f"test_{self.kind}.py.txt").read_text(encoding="utf-8")


SCAFFOLDS: dict[str, Scaffold] = {
    scaffold.kind: scaffold
    for scaffold in (
        Scaffold(
            "advantage",
            "advantage",
            ("[algorithm]", 'advantage_mode = "$name.advantage"', "advantage_params = { epsilon = 1e-6 }"),
        ),
        Scaffold(
            "transform",
            "make_transform_spec",
            ("[algorithm]", 'transform_mode = "$name.make_transform_spec"', "transform_params = { boost = 0.5 }"),
        ),
        Scaffold(
            "algorithm",
            "assign_credit",
            ("[algorithm]", 'algorithm_mode = "$name.assign_credit"', "transform_params = { strength = 1.0 }"),
        ),
        Scaffold("loss", "Loss", ("[loss]", 'type = "$name.Loss"')),
        Scaffold("reward", "score", ("[reward]", 'type = "$name.score"')),
        Scaffold("data", "Source", ("[data]", 'source = "$name.Source"')),
        Scaffold(
            "environment",
            "Environment",
            ("[environment]", 'provider = "$name.Environment"', "args = { tries = 3 }"),
        ),
        Scaffold("planning", "Detector", ("[planning]", 'detector = "$name.Detector"')),
        Scaffold("engine", "Engine", ("[inference]", 'engine = "$name.Engine"')),
        Scaffold("backend", "build", ("[backend]", 'backend = "$name.build"')),
    )
}


@click.command("init-plugin", short_help="Write a plugin to start from.")
@click.option(
    "--kind",
    required=True,
    metavar="KIND",
    type=click.Choice(list(SCAFFOLDS)),
    help=f"Component to replace: {', '.join(SCAFFOLDS)}.",
)
@click.option("--name", required=True, metavar="NAME", help="Name of the module.")
@click.option("--with-test", is_flag=True, help="Also write a test, which passes as generated.")
@click.option(
    "--output", default=".", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to (default: .)."
)
def command(kind: str, name: str, with_test: bool, output: Path) -> None:
    """Write NAME.py, a plugin that works unchanged, and print the lines of TOML that use it."""
    scaffold = SCAFFOLDS[kind]
    files = {output / f"{name}.py": scaffold.module}
    if with_test:
        files[output / f"test_{name}.py"] = scaffold.test
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(f"--name {name!r} is not a valid module name.  Try: letters, digits and _, e.g. my_plugin")
    present = [path for path in files if path.exists()]
    if present:
        raise ConfigError(f"{present[0]} already exists.  Try: another --name or --output.")
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


def _check_is_free(name: str) -> None:
    """A module of the same name on the import path could be imported instead of the plugin."""
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
        lines += [f"Its test, with pytest installed:  python -m pytest {output / f'test_{name}.py'}"]
    lines += [
        "To ship it in a package, so that its name alone is enough, add to the pyproject.toml of that package:",
        "",
        f'[project.entry-points."retrain.{kind}"]',
        f'{name} = "{name}:{scaffold.attribute}"',
    ]
    return "\n".join(lines)
