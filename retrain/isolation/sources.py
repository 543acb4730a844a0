"""Source files of the user: those of a module and of what it imports, found without importing them.

A process that is started later, because another one died, imports the sources as they were read when the run began.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    all_suffixes,
)
from importlib.util import find_spec as find_installed
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """A module's file and what it contained."""

    path: str
    text: bytes

    @property
    def is_package(self) -> bool:
        """Whether it is the __init__.py of a package."""
        return os.path.basename(self.path) == "__init__.py"

    @property
    def folder(self) -> str:
        """Where Python looks for it: the folder of the module's file or of the package's folder."""
        folder = os.path.dirname(self.path)
        return os.path.dirname(folder) if self.is_package else folder


Modules = dict[str, Source]
"""Modules as they were read, by name."""


@dataclass(frozen=True)
class Sources:
    """The modules of the user, and what lay in the folders in which Python looks for them."""

    modules: Modules = field(default_factory=dict)
    entries: Mapping[str, Set[str] | None] = field(default_factory=dict)
    """Of each folder, those that may be a module of such a name; None if it cannot be listed, as a zip file."""


_INSTALLED = {"site-packages", "dist-packages"}
# Imports are followed to this many files, so a folder with a large project does not delay a run.
_MOST_FILES = 200


def find_source(module: str, search_paths: Sequence[str]) -> Path | None:
    """The Python file of a module; None if there is none, or if only an import can find it."""
    return _ImportPath(search_paths).find_source(module)


def find_spec(module: str, search_paths: Sequence[str]) -> ModuleSpec | None:
    """Where Python would find a module, without importing the packages that it is in."""
    return _ImportPath(search_paths).find_spec(module)


class _ImportPath:
    """The folders in which Python looks for modules, listed once, since a run's code may import hundreds."""

    def __init__(self, search_paths: Sequence[str]) -> None:
        folders = dict.fromkeys(os.path.abspath(os.path.expanduser(folder)) for folder in (*search_paths, *sys.path))
        self.entries = {folder: _list(folder) for folder in folders}

    def find_source(self, module: str) -> Path | None:
        spec = self.find_spec(module)
        # In a zip file, there is no file.
        is_file = spec is not None and spec.origin and spec.origin.endswith(".py") and os.path.isfile(spec.origin)
        return Path(spec.origin) if spec is not None and spec.origin and is_file else None

    def find_spec(self, module: str) -> ModuleSpec | None:
        outermost, *others = module.split(".")
        names = {outermost + suffix for suffix in ("", *all_suffixes())}
        paths = [f for f, entries in self.entries.items() if entries is None or not names.isdisjoint(entries)]
        spec = PathFinder.find_spec(outermost, paths) or _ask_hooks(outermost)
        for part in others:
            # By its last part: of a whole name, folders without __init__.py look for a parent that is imported.
            spec = spec and PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
        return spec or (_ask_hooks(module) if others else None)


def _ask_hooks(module: str) -> ModuleSpec | None:
    """Where an import hook finds a module, as of a package that is installed in editable mode."""
    usual = (BuiltinImporter, FrozenImporter, PathFinder)
    try:
        return _ask([hook for hook in sys.meta_path if hook not in usual], module, None)
    except Exception:
        return None  # the import will say why


def _ask(finders: Iterable[object], *what: Any) -> ModuleSpec | None:
    """What the first of these finders that finds something says."""
    asked = (finder.find_spec(*what) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in asked if spec is not None), None)


def _list(folder: str) -> set[str] | None:
    """The entries of a folder; None if it cannot be listed, as a zip file."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def is_findable(module: str, search_paths: Sequence[str]) -> bool:
    """Whether a module can be found; of one that is installed, its outermost package, which may create the others."""
    outermost = module.partition(".")[0]
    folders = {os.path.realpath(os.path.expanduser(folder)) for folder in search_paths}
    spec = find_spec(outermost, search_paths)
    # In the folder itself: an environment with packages may be somewhere inside of it.
    if spec is not None and not folders.isdisjoint(_folders_with(spec)):
        return module in sys.modules or find_spec(module, search_paths) is not None
    try:
        return spec is not None or find_installed(outermost) is not None
    except ValueError:
        return True  # in use without a spec, like __main__


def _folders_with(spec: ModuleSpec) -> set[str]:
    """The folders that contain a module's file or a package's folder, which need not have an __init__.py."""
    places = [Path(place).resolve() for place in (spec.origin, *(spec.submodule_search_locations or [])) if place]
    return {str(place.parent) for place in places}


def read_sources(module: str, search_paths: Sequence[str]) -> tuple[Modules, Modules]:
    """The source of a module, or of all modules of its package; and other modules of the user that it imports."""
    return _read_sources(module, _ImportPath(search_paths))


def _read_sources(module: str, import_path: _ImportPath) -> tuple[Modules, Modules]:
    outermost = module.partition(".")[0]
    file = import_path.find_source(outermost)
    if file is None:
        outermost, file = module, import_path.find_source(module)
    if file is None:
        return {}, {}
    files = _list_sources(file.parent) if file.name == "__init__.py" else [file]
    texts = {_name(path, file, outermost): (path, _read(path)) for path in files}
    own = {name: Source(str(path), text) for name, (path, text) in texts.items() if text is not None}
    # A hook may find a part of a package in another folder.
    elsewhere = import_path.find_source(module) if module not in own else None
    if elsewhere is not None and (text := _read(elsewhere)) is not None:
        own[module] = Source(str(elsewhere), text)
    return own, {} if _is_installed(file) else _follow_imports(own, import_path)


def read_all_sources(modules: Iterable[str], search_paths: Sequence[str]) -> Sources:
    """The sources of all these modules and of what they import."""
    import_path, found = _ImportPath(search_paths), Modules()
    for module in modules:
        own, imported = _read_sources(module, import_path)
        found |= own | imported
    if not found:
        return Sources()
    names = {"__init__", *(part for name in found for part in name.split("."))}
    entries: dict[str, Set[str] | None] = {}
    queue = [*import_path.entries, *(source.folder for source in found.values())]
    for folder in queue:
        if folder not in entries:
            listed = _list(folder)
            entries[folder] = listed and {entry for entry in listed if entry.partition(".")[0] in names}
            # Packages, with or without an __init__.py.
            queue += [os.path.join(folder, entry) for entry in entries[folder] or () if entry in names]
    return Sources(found, entries)


def import_as_read(sources: Sources) -> None:
    """Import these modules as they were read, from now on, whatever became of the files since."""
    if sources.modules:
        index = next((i for i, finder in enumerate(sys.meta_path) if finder is PathFinder), len(sys.meta_path))
        sys.meta_path.insert(index, _Finder(sources))


class _Finder(MetaPathFinder):
    """Finds what Python would find if the files were still those that were read."""

    def __init__(self, sources: Sources) -> None:
        self._modules, self._entries = sources.modules, sources.entries
        self._files = {source.path: source for source in sources.modules.values()}
        self._last_parts = {name.rpartition(".")[2] for name in sources.modules}
        # Of packages without an __init__.py: their folders.
        self._portions: dict[str, dict[str, None]] = {}
        for name, source in sources.modules.items():
            folder = source.folder
            while name := name.rpartition(".")[0]:
                if name not in sources.modules:
                    self._portions.setdefault(name, {})[folder] = None
                folder = os.path.dirname(folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] not in self._last_parts and fullname not in self._portions:
            return None
        found, source = self._find_now(fullname, path, target), self._modules.get(fullname)
        if source is None or not self._comes_first(source, found, sys.path if path is None else path):
            # By another name, or from a folder that was put in front.
            source = self._files.get(os.path.abspath(found.origin)) if found is not None and found.origin else None
        if source is not None:
            return spec_from_file_location(fullname, source.path, loader=_Loader(fullname, source))
        return self._find_portions(fullname, found)

    def _find_now(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Where Python would find a module without this finder."""
        return _ask(sys.meta_path[sys.meta_path.index(self) + 1 :], fullname, path, target)

    def _comes_first(self, source: Source, found: ModuleSpec | None, path: Sequence[str]) -> bool:
        folders = [os.path.abspath(folder) for folder in path]
        if source.folder not in folders:
            return False
        # A package without an __init__.py comes after all others.
        if found is None or found.origin is None or os.path.abspath(found.origin) == source.path:
            return True
        folder = os.path.dirname(os.path.abspath(found.origin))
        folder = folder if found.submodule_search_locations is None else os.path.dirname(folder)
        return self._is_new(found) or (folder in folders and folders.index(folder) > folders.index(source.folder))

    def _is_new(self, found: ModuleSpec) -> bool:
        """Whether it was not there when the sources were read."""
        file = os.path.abspath(found.origin or "")
        for path in (file, os.path.dirname(file)) if found.submodule_search_locations is not None else (file,):
            folder, entry = os.path.split(path)
            listed = self._entries.get(folder)
            if listed is not None and entry not in listed:
                return True
        return False

    def _find_portions(self, fullname: str, found: ModuleSpec | None) -> ModuleSpec | None:
        """A package without an __init__.py, of which a folder is gone or which has become another."""
        portions = self._portions.get(fullname, {})
        now = list(found.submodule_search_locations or ()) if found is not None and found.origin is None else []
        is_other = found is not None and found.origin is not None
        if (is_other and found is not None and not self._is_new(found)) or portions.keys() <= set(now):
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = list({**portions, **dict.fromkeys(now)})
        return spec


class _Loader(SourceFileLoader):
    """Loads a module as it was read. There is no bytecode of it: that may be of another version."""

    def __init__(self, fullname: str, source: Source) -> None:
        super().__init__(fullname, source.path)
        self._text = source.text

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise FileNotFoundError(path)

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)


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


def _follow_imports(own: Modules, import_path: _ImportPath) -> Modules:
    """Sources of the user that these modules import, and so on, in the order in which they are met."""
    queue = list(own.items())[:_MOST_FILES]
    seen, found = set(own), Modules()
    # Names below these are not looked for: in installed packages nothing is the user's, and in a file are no modules.
    closed = {"retrain", *sys.stdlib_module_names}
    for name, source in queue:
        package = name if source.is_package else name.rpartition(".")[0]
        for imported in _imported_names(source.text, package):
            if imported in seen or len(found) >= _MOST_FILES:
                continue
            seen.add(imported)
            if not closed.isdisjoint((imported, imported.partition(".")[0], imported.rpartition(".")[0])):
                continue
            file = import_path.find_source(imported)
            if file is None:
                continue
            if _is_installed(file) or file.name != "__init__.py":
                closed.add(imported)
            if not _is_installed(file) and (text := _read(file)) is not None:
                found[imported] = Source(str(file), text)
                queue.append((imported, found[imported]))
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


def _read(path: Path) -> bytes | None:
    """The content of a source file; None if it cannot be read, which its import will say."""
    try:
        return path.read_bytes()
    except OSError:
        return None
