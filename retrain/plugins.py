"""Registries of replaceable parts: a built-in name, an entry point `retrain.<kind>`, or a dotted path.

Built-ins are `"module:attribute"` strings, so that nothing heavy is imported before it is selected. A new built-in is
one file and one line in `REGISTRIES`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from retrain.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


ImportPath = tuple[tuple[str, int], ...]
"""The folders of `sys.path`, each with the time of its last change."""

# folder/module.py, with or without :attribute or .attribute
_FILE = re.compile(r"(?:(?P<folder>.+)/)?(?P<module>[^/:]+)\.py(?:[:.](?P<attribute>\w+))?")


@dataclass(frozen=True)
class Part:
    """A built-in part, with facts that configurations are validated against without importing it."""

    target: str
    reads: tuple[str, ...] = ()
    """Options of its table that it reads, among those that not every part of its kind reads."""
    requires: tuple[str, ...] = ()
    """Those of them that must be set."""
    from_hub: bool = False
    """Whether it downloads from the Hugging Face Hub."""
    packages: tuple[str, ...] = ()
    """Packages that it needs."""
    two_splits: bool = False
    """Whether all data splits but `train` are the same held-out set."""
    endless: bool = False
    """Whether a data source has examples without end."""
    id_is_module: bool = False
    """Whether the `id` in its table names a Python module, of the user or installed."""
    explains_missing: str = ""
    """For an environment provider: a function of its table and the search paths, as "module:attribute", that returns an
    issue if there is no such environment, without importing it."""
    server_flags: Mapping[str, str] = field(default_factory=dict)
    """For a server, its flags that correspond to options of `[inference]` about sampling in this process."""


@dataclass(frozen=True)
class Registry:
    """The parts of one kind. `what` completes the sentence "… is not a known {what}"."""

    kind: str
    what: str
    parts: Mapping[str, str | Part] = field(default_factory=dict)
    """Built-in parts by name, each a "module:attribute" or a `Part`."""

    @cached_property
    def builtins(self) -> dict[str, str]:
        """The "module:attribute" of each built-in part, by name."""
        return {name: part if isinstance(part, str) else part.target for name, part in self.parts.items()}

    def facts(self, name: str) -> Part:
        """Facts about a built-in part; nothing is known of a plugin."""
        part = self.parts.get(name, "")
        return Part(part) if isinstance(part, str) else part

    def reads(self, name: str, key: str) -> bool:
        """Whether a part reads an option of its table; a plugin may read any."""
        return name not in self.parts or key in self.facts(name).reads

    def readers(self, key: str) -> list[str]:
        """The built-in parts that read an option of their table."""
        return [name for name in self.parts if key in self.facts(name).reads]

    @property
    def group(self) -> str:
        """The entry-point group through which packages add parts of this kind."""
        return f"retrain.{self.kind}"

    def discovered(self) -> dict[str, EntryPoint]:
        """Parts that installed packages declare, by name."""
        return {point.name: point for point in _read_entry_points(self.group, _stamp_import_path())}

    def names(self) -> list[str]:
        """All names that need no dotted path."""
        return [*self.builtins, *(name for name in self.discovered() if name not in self.builtins)]

    def explain_unknown(self, name: str) -> str:
        """Why `name` is not a part of this kind, or "". Imports nothing."""
        if hint := suggest_module(name, "NAME"):
            return f"{name[:60]!r} names a file instead of a module. {hint}"
        of_files, suffix = self.readers("path"), name.rpartition(".")[2]
        # As a dotted path, it would import what lies beside the file, such as the script that writes it.
        if of_files and "." in name and (suffix in of_files or os.path.isfile(name)):
            source = suffix if suffix in of_files else of_files[0]
            return f'{name[:60]!r} is a file, not a {self.what}. Try: "{source}", and path = "{name}"'
        if name in self.builtins or is_dotted_path(name) or name in self.discovered():
            return ""
        close = get_close_matches(name[:60], self.names(), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(self.names())}, or a dotted path."
        return f"{name[:60]!r} is not a known {self.what}. {hint}"

    def load(self, name: str, search_paths: Sequence[str] = ()) -> object:
        """Import the part called `name`. The caller checks its interface."""
        if name in self.builtins:
            return import_path(self.builtins[name], self.kind)
        point = self.discovered().get(name)
        if point is not None:
            try:
                return point.load()
            except (Exception, SystemExit) as error:
                raise PluginError(f"{self.kind} plugin {name!r} ({point.value}) failed to load: {error!r}") from error
        if not is_dotted_path(name):
            raise PluginError(self.explain_unknown(name))
        make_importable(search_paths)
        return import_path(name, self.kind)


@lru_cache
def _read_entry_points(group: str, import_path: ImportPath) -> EntryPoints:
    """What packages on this import path declare. It is kept: there may be hundreds of packages to read."""
    from importlib.metadata import entry_points  # noqa: PLC0415  (a tenth of the start-up time, seldom needed)

    return entry_points(group=group)


def _stamp_import_path() -> ImportPath:
    """Where packages are looked for; it changes when one is installed, which a page that stays open must notice."""
    stamps = []
    for folder in sys.path:
        try:
            stamps.append((folder, os.stat(folder or ".").st_mtime_ns))
        except OSError:
            stamps.append((folder, 0))
    return tuple(stamps)


def is_plugin(kind: str, name: str) -> bool:
    """Whether a name stands for user code, which may read any option."""
    return name not in REGISTRIES[kind].builtins


def module_of_plugin(kind: str, name: str) -> str:
    """The module of a plugin; "" if the name is that of a built-in part."""
    if not name or not is_plugin(kind, name):
        return ""
    point = REGISTRIES[kind].discovered().get(name)
    return split_path(name)[0] if point is None else point.module


def is_dotted_path(name: str) -> bool:
    """Whether `name` is like `package.module.attribute`, `package.module:attribute` or `module:Class.attribute`."""
    parts = name.replace(":", ".", 1).split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def suggest_module(name: str, attribute: str = "") -> str:
    """What to write in place of a Python file; "" if `name` is none. `attribute` stands for one that it lacks."""
    file = _FILE.fullmatch(name)
    if file is None:
        return ""
    attribute = file["attribute"] or attribute
    module, folder = file["module"], Path(file["folder"] or "")
    while folder.name and (folder / "__init__.py").is_file():  # a package
        module, folder = f"{folder.name}.{module}", folder.parent
    paths = "" if folder == Path() else f', and [plugins] search_paths = ["{folder}"]'
    return f'Try: "{module}{f":{attribute}" if attribute else ""}"{paths}'


def split_path(path: str) -> tuple[str, str]:
    """The module and the attribute of `module:attribute` or `module.attribute`."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return module, attribute


def import_path(path: str, kind: str) -> object:
    """Import `module:attribute` or `module.attribute`; the error names what is missing."""
    module_name, attribute = split_path(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name:
            raise PluginError(f"{kind} plugin {path!r}: importing {module_name!r} failed: {error!r}") from error
        if module_name == error.name or module_name.startswith(f"{error.name}."):
            package, _, inner = error.name.rpartition(".")
            hint = suggest_module(path) or (
                f"The package {package} has no {inner}."
                if package
                else f"Try: put {error.name}.py into the working directory, or name its folder in "
                '[plugins] search_paths = ["folder"].'
            )
            raise PluginError(f"{kind} plugin {path!r}: there is no module {module_name!r}. {hint}") from error
        raise PluginError(
            f"{kind} plugin {path!r}: its module needs {error.name!r}, which is not installed."
            f"{_suggest_neighbour(module_name, error.name)}"
        ) from error
    except (Exception, SystemExit) as error:
        # SystemExit: a script that was not meant to be imported must not end the run silently.
        # The arguments of a syntax error are places in the file, which its text has as well.
        reason = f"SyntaxError: {error}" if isinstance(error, SyntaxError) else repr(error)
        raise PluginError(f"{kind} plugin {path!r}: importing {module_name!r} failed: {reason}") from error
    try:
        found: object = module
        for name in attribute.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        close = get_close_matches(attribute, _own_names(module), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if module_name in sys.stdlib_module_names:
            hint = " It is a module of Python.  Try: another name for your file"
        raise PluginError(f"{kind} plugin {path!r}: {module_name!r} has no {attribute!r}.{hint}") from error
    return found


def _suggest_neighbour(module: str, missing: str) -> str:
    """What to write where a module imports a file of its folder, which is not on the import path."""
    from retrain.isolation.sources import find_source  # noqa: PLC0415  (only an error needs it)

    source = find_source(module, ())
    if source is None or not source.with_name(f"{missing}.py").is_file():
        return ""
    folder = os.path.relpath(source.parent)
    return f' {missing}.py is beside it.  Try: from .{missing} import …, or [plugins] search_paths = [".", "{folder}"]'


def _own_names(module: ModuleType) -> list[str]:
    """The public names of a module that may be plugins: no constants, no modules, nothing of another package."""
    names = []
    for name, value in vars(module).items():
        is_named = inspect.isroutine(value) or inspect.isclass(value)
        package = (value.__module__ or "").split(".")[0] if is_named else ""
        is_own = not is_named or package == module.__name__.split(".")[0]
        # A dataclass: transforms are values.
        if not name.startswith("_") and is_own and (callable(value) or is_dataclass(value)):
            names.append(name)
    return names


def make_importable(search_paths: Sequence[str]) -> None:
    """Put folders at the front of the import path, in order and permanently: a plugin may import lazily."""
    folders = dict.fromkeys(str(Path(path).expanduser().resolve()) for path in search_paths)
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    importlib.invalidate_caches()


# Options of [data] about rows of a file or dataset.
_ROW_OPTIONS = ("prompt_field", "answer_field", "remove_unused_columns")

# Options of [loss] that a clipped and capped loss reads.
_CLIPPED = ("clip_low", "clip_high", "ratio_cap")

REGISTRIES: dict[str, Registry] = {
    registry.kind: registry
    for registry in (
        Registry(
            "advantage",
            "advantage",
            {
                "grpo": "retrain.advantages.episode:grpo",
                "grpo_scaled": "retrain.advantages.episode:grpo_scaled",
                "maxrl": "retrain.advantages.episode:maxrl",
            },
        ),
        Registry(
            "transform",
            "transform",
            {
                "none": "retrain.advantages.method:NONE",
                "gtpo": "retrain.advantages.method:GTPO",
                "gtpo_hicra": "retrain.advantages.method:GTPO_HICRA",
                "gtpo_sepa": "retrain.advantages.method:GTPO_SEPA",
            },
        ),
        Registry("algorithm", "algorithm"),
        Registry(
            "uncertainty",
            "uncertainty",
            {
                "surprisal": "retrain.advantages.uncertainty:surprisal",
                "predictive_variance": "retrain.advantages.uncertainty:predictive_variance",
                "shannon_entropy": "retrain.advantages.uncertainty:shannon_entropy",
            },
        ),
        Registry(
            "planning",
            "planning detector",
            {
                "regex": "retrain.planning.regex:RegexDetector",
                "semantic": Part("retrain.planning.semantic:SemanticDetector", packages=("sentence-transformers",)),
            },
        ),
        Registry(
            "reward",
            "reward",
            {
                "match": "retrain.rewards.match:MatchReward",
                "math": Part("retrain.rewards.math:MathReward", packages=("math-verify",)),
                "judge": "retrain.rewards.judge:JudgeReward",
                "custom": "retrain.rewards.custom:CustomReward",
            },
        ),
        Registry(
            "data",
            "data source",
            {
                "math": Part(
                    "retrain.data.math:MathSource",
                    ("subset", "split", "remove_unused_columns"),
                    from_hub=True,
                    packages=("datasets",),
                ),
                "gsm8k": Part(
                    "retrain.data.gsm8k:Gsm8kSource", ("subset", "split"), from_hub=True, packages=("datasets",)
                ),
                "arithmetic": Part(
                    "retrain.data.arithmetic:ArithmeticSource", ("split",), two_splits=True, endless=True
                ),
                "jsonl": Part("retrain.data.jsonl:JsonlSource", ("path", *_ROW_OPTIONS), requires=("path",)),
                "hub": Part(
                    "retrain.data.hub:HubSource",
                    ("id", "subset", "split", *_ROW_OPTIONS),
                    requires=("id",),
                    from_hub=True,
                    packages=("datasets",),
                ),
            },
        ),
        Registry(
            "loss",
            "loss",
            {
                "importance_sampling": Part("retrain.losses.importance_sampling:ImportanceSampling", ("ratio_cap",)),
                "ppo": Part("retrain.losses.ppo:PPO", _CLIPPED),
                "cispo": Part("retrain.losses.cispo:CISPO", ("clip_low", "clip_high")),
                "gspo": Part("retrain.losses.gspo:GSPO", _CLIPPED),
                "dr_grpo": Part("retrain.losses.dr_grpo:DrGRPO", _CLIPPED),
                "grpo": Part("retrain.losses.grpo:GRPO", _CLIPPED),
            },
        ),
        Registry(
            "engine",
            "inference engine",
            {
                "pytorch": Part("retrain.inference_engine.pytorch:build", packages=("torch", "peft")),
                "max": Part(
                    "retrain.inference_engine.max:MAX",
                    server_flags={"dtype": "--quantization-encoding", "prefix_caching": "--no-enable-prefix-caching"},
                ),
                "vllm": Part(
                    "retrain.inference_engine.vllm:VLLM",
                    server_flags={
                        "attention_kernel": "--attention-backend",
                        "dtype": "--dtype and --quantization",
                        "kv_cache_dtype": "--kv-cache-dtype",
                        "prefix_caching": "--no-enable-prefix-caching",
                    },
                ),
                "sglang": Part(
                    "retrain.inference_engine.sglang:SGLANG",
                    server_flags={
                        "attention_kernel": "--attention-backend",
                        "dtype": "--dtype and --quantization",
                        "kv_cache_dtype": "--kv-cache-dtype",
                        "prefix_caching": "--disable-radix-cache",
                    },
                ),
                "mlx": Part(
                    "retrain.inference_engine.mlx:MLX",
                    server_flags={"dtype": "a model from mlx_lm.convert --dtype", "kv_cache_dtype": "--kv-bits"},
                ),
                "openai": "retrain.inference_engine.openai:OPENAI",
            },
        ),
        Registry(
            "environment",
            "environment provider",
            {
                "builtin": Part(
                    "retrain.environments.builtin:load", explains_missing="retrain.environments.builtin:explain_missing"
                ),
                "verifiers": Part(
                    "retrain.environments.verifiers:load",
                    packages=("verifiers",),
                    id_is_module=True,
                    explains_missing="retrain.environments.verifiers.modules:explain_missing",
                ),
                "reasoning_gym": Part("retrain.environments.reasoning_gym:load", packages=("reasoning-gym",)),
            },
        ),
        Registry(
            "backend",
            "backend",
            {
                "local": Part("retrain.backends.local:build", packages=("torch", "transformers", "peft")),
                "tinker": Part("retrain.backends.tinker:build", packages=("tinker",)),
            },
        ),
    )
}

SERVER_ENGINES = frozenset(REGISTRIES["engine"].parts) - {"pytorch"}
"""Engines that sample on a server rather than in this process."""
