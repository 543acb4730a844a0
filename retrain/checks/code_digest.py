"""Digests of the code that a configuration names: rewards, plugins, and what they import. By them edits are noticed."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

from retrain.checks.user_code import find_source
from retrain.config import TrainConfig
from retrain.config.options import all_options, values_of
from retrain.config.schema import Reward, RewardTerm
from retrain.environments.verifiers.modules import module_name
from retrain.plugins import REGISTRIES, is_plugin, split_path

_INSTALLED = {"site-packages", "dist-packages"}
# Imports are followed to this many files, so a folder with a large project does not delay a run.
_MOST_FILES = 200
# Digests of plugins that are imported here. Later runs of this process use the same module, whatever its file says.
_IMPORTED: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()


def code_digests(config: TrainConfig, of_scoring: bool = False) -> dict[str, str]:
    """A digest of each module that the configuration names, custom rewards and plugins, and of what it imports.

    Those `of_scoring` decide what counts as correct.
    """
    values = values_of(config)
    named = [(option.kind, str(values.get(option.path) or "")) for option in all_options() if option.kind]
    terms: list[Reward | RewardTerm] = [config.reward, *config.reward.terms]
    named += [("reward", term.type) for term in terms]
    if of_scoring:
        named = [(kind, name) for kind, name in named if kind in ("reward", "environment")]
    plugins = {split_path(name)[0] for kind, name in named if kind and name and is_plugin(kind, name)}
    rewards = {term.custom_module for term in terms if term.type == "custom"}
    id_is_module = REGISTRIES["environment"].facts(config.environment.provider).id_is_module
    named_by_id = {module_name(config.environment.id)} if id_is_module else set()
    modules = sorted(plugins | rewards | named_by_id)
    found = {module: _digest(module, config.plugins.search_paths) for module in modules if module}
    for module in plugins & found.keys() & sys.modules.keys():
        found[module] = _IMPORTED.setdefault(sys.modules[module], found[module])
    return {module: digest for module, digest in found.items() if digest}


def _digest(module: str, search_paths: Sequence[str]) -> str:
    """A digest of a module's source, or of all modules of its package, and, after a ~, of other modules of the user
    that it imports, if there are any; empty if there is no source."""
    outermost = module.partition(".")[0]
    file = find_source(outermost, search_paths)
    if file is None:
        outermost, file = module, find_source(module, search_paths)
    if file is None:
        return ""
    files = _list_sources(file.parent) if file.name == "__init__.py" else [file]
    own = {path: _name(path, file, outermost) for path in files}
    imported = [] if _is_installed(file) else _follow_imports(own, search_paths)
    return "~".join(_digest_files(files) for files in (own, imported) if files)


def _list_sources(package: Path) -> list[Path]:
    """The modules of a package, without hidden files, as editors make them, and environments inside it."""
    found = []
    for folder, inside, names in os.walk(package):
        inside[:] = [name for name in inside if not name.startswith(".") and name not in _INSTALLED]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")]
    return sorted(found)


def _name(path: Path, outermost: Path, name: str) -> str:
    """The name of a module of the outermost module, which may be a package and has that name."""
    below = [] if path == outermost else path.relative_to(outermost.parent).with_suffix("").parts
    return ".".join([name, *below]).removesuffix(".__init__")


def _follow_imports(own: Mapping[Path, str], search_paths: Sequence[str]) -> list[Path]:
    """Source files of the user that these modules import, and so on, in the order in which they are met."""
    queue = [(name, path) for path, name in own.items()][:_MOST_FILES]
    seen, found = set(own.values()), list[Path]()
    for name, path in queue:
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imported_names(_read(path), package):
            if imported in seen or len(found) >= _MOST_FILES:
                continue
            seen.add(imported)
            outermost = imported.partition(".")[0]
            is_known = outermost in sys.stdlib_module_names or outermost == "retrain"
            source = None if is_known else find_source(imported, search_paths)
            if source is not None and source not in own and not _is_installed(source):
                queue.append((imported, source))
                found.append(source)
    return found


@lru_cache(maxsize=4 * _MOST_FILES)
def _imported_names(source: bytes, package: str) -> tuple[str, ...]:
    """The modules that a module of a package imports, anywhere in its source, with the packages they are in.

    What is imported from a module may be a module as well.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about escape sequences, for example
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names = []
    for node in nodes:
        origin = ""
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
            origin = ".".join(filter(None, [*parts, node.module])) + "."
        names += [f"{origin}{alias.name}".split(".") for alias in node.names]
    return tuple(dict.fromkeys(".".join(parts[:count]) for parts in names for count in range(1, len(parts) + 1)))


def _is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package, which is replaced rather than edited."""
    return not _INSTALLED.isdisjoint(file.parts)


def _digest_files(files: Iterable[Path]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for each in files:
        found.update(_read(each))
    return found.hexdigest()


def _read(path: Path) -> bytes:
    """The content of a source file; empty if it cannot be read, which only matters if it is imported."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
