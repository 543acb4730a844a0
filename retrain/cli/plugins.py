"""`retrain plugins`: the parts that a configuration can name, and where they come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Literal

import click

from retrain.cli.console import print_heading, print_json, print_table
from retrain.config.options import all_options
from retrain.plugins import REGISTRIES, Part, Registry
from retrain.runtime.packages import check_package, install_command, requirements


@dataclass(frozen=True)
class ListedPart:
    """A name that a configuration can use."""

    name: str
    status: Literal["ok", "missing", "broken", "shadowed"]
    source: str
    """`built in`, or the package that declares the entry point and its version."""
    target: str
    """`module:attribute`."""
    reason: str = ""
    """Why it is broken or shadowed, or what is missing."""


@click.command("plugins", short_help="List built-in components and installed plugins.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {kind: {options, parts: [...]}}.")
def command(as_json: bool) -> None:
    """List the components that a configuration can name: built in, or from the entry points of installed packages.

    A dotted path to your own code works too: see `retrain init-plugin`.
    """
    found = {kind: list_parts(registry) for kind, registry in REGISTRIES.items()}
    if as_json:
        print_json(
            {kind: {"options": _options(kind), "parts": [asdict(part) for part in found[kind]]} for kind in found}
        )
        return
    for kind, parts in found.items():
        print_heading(f"{kind}  {', '.join(_options(kind))}")
        if sys.stdout.isatty():
            _print_short(parts)
            continue
        rows = [(kind, part.name, part.status, part.source, f"{part.target}  {part.reason}".rstrip()) for part in parts]
        print_table(
            ("kind", "name", "status", "from", "where"),
            rows or [(kind, "-", "ok", "-", "a dotted path to your own code")],
        )


def _print_short(parts: Sequence[ListedPart]) -> None:
    """What a reader needs: the status only where something is wrong, the package only where it is another one."""
    if not parts:
        click.echo("  a dotted path to your own code")
        return
    rows = []
    for part in parts:
        source = "" if part.source == "built in" else f" ({part.source})"
        rows.append((part.name, part.status, f"{part.target}{source}  {part.reason}".rstrip()))
    if all(part.status == "ok" for part in parts):
        print_table(("name", "where"), [(name, where) for name, _, where in rows])
    else:
        print_table(("name", "status", "where"), rows)


def list_parts(registry: Registry) -> list[ListedPart]:
    """Built-in parts, then those of installed packages, which are imported to check that they work."""
    built_in = [_check_builtin(name, registry.facts(name)) for name in registry.parts]
    return built_in + [_check_entry_point(registry, point) for point in registry.discovered().values()]


def _check_builtin(name: str, part: Part) -> ListedPart:
    for package in part.packages:
        declared = requirements().get(package)
        text = declared.text if declared is not None else package
        _, problem = check_package(package, text)
        if problem:
            return ListedPart(
                name, "missing", "built in", part.target, f"{package} {problem}: {install_command(package)}"
            )
    return ListedPart(name, "ok", "built in", part.target)


def _check_entry_point(registry: Registry, point: EntryPoint) -> ListedPart:
    source = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an installed package"
    if point.name in registry.builtins:
        return ListedPart(point.name, "shadowed", source, point.value, "the built-in of the same name is used")
    try:
        point.load()
    except Exception as error:
        return ListedPart(point.name, "broken", source, point.value, f"{type(error).__name__}: {error}")
    return ListedPart(point.name, "ok", source, point.value)


def _options(kind: str) -> list[str]:
    return [option.where for option in all_options() if option.kind == kind]
