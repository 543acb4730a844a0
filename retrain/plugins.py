"""Where every replaceable part is found: a built-in name, an entry point `retrain.<kind>`, or a dotted path.

Built-ins are `"module:attribute"` strings, so that nothing heavy is imported before it is chosen. A new built-in is one
new file and one line in the table at the foot of this page.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Registry:
    """The parts of one kind. `what` completes the sentence "… is not a known {what}"."""

    kind: str
    what: str
    builtins: Mapping[str, str] = field(default_factory=dict)
    """Names a configuration may hold although this version has no such part; loading one is refused."""

    @property
    def group(self) -> str:
        """The entry-point group that installed packages use to add parts of this kind."""
        return f"retrain.{self.kind}"

    def discovered(self) -> dict[str, EntryPoint]:
        """Parts that installed packages declare, by name."""
        from importlib.metadata import entry_points  # noqa: PLC0415  (a tenth of the start-up time, seldom needed)

        return {point.name: point for point in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Every name that can be written in a TOML without a dotted path."""
        return [*self.builtins, *(name for name in self.discovered() if name not in self.builtins)]

    def problem_with(self, name: str) -> str:
        """Why `name` cannot be a part of this kind, or "" when it can. Imports nothing."""
        if name in self.builtins or is_dotted_path(name) or name in self.discovered():
            return ""
        close = get_close_matches(name[:60], self.names(), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(self.names())}, or a dotted path."
        return f"{name[:60]!r} is not a known {self.what}. {hint}"

    def load(self, name: str, search_paths: Sequence[str] = ()) -> object:
        """Import the part called `name`. The caller checks that it has the shape it needs."""
        if name in self.builtins:
            return import_path(self.builtins[name], self.kind)
        point = self.discovered().get(name)
        if point is not None:
            try:
                return point.load()
            except (Exception, SystemExit) as error:
                raise PluginError(f"{self.kind} plug-in {name!r} ({point.value}) failed to load: {error!r}") from error
        if not is_dotted_path(name):
            raise PluginError(self.problem_with(name))
        make_importable(search_paths)
        return import_path(name, self.kind)


def is_plugin(kind: str, name: str) -> bool:
    """Whether a name stands for code of the user's own, which may read any option."""
    return name not in REGISTRIES[kind].builtins


def is_dotted_path(name: str) -> bool:
    """Whether `name` reads as `package.module.attribute`, `package.module:attribute` or `module:Class.attribute`."""
    parts = name.replace(":", ".", 1).split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def import_path(path: str, kind: str) -> object:
    """Import `module:attribute` or `module.attribute`, saying what was missing when it fails."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name:
            raise PluginError(f"{kind} plug-in {path!r}: importing {module_name!r} failed: {error!r}") from error
        if module_name == error.name or module_name.startswith(f"{error.name}."):
            raise PluginError(
                f"{kind} plug-in {path!r}: there is no module {module_name!r}. "
                f"Try: put {module_name.split('.')[0]}.py into the working directory, or name its folder in "
                '[plugins] search_paths = ["folder"].'
            ) from error
        raise PluginError(
            f"{kind} plug-in {path!r}: its module needs {error.name!r}, which is not installed."
        ) from error
    except (Exception, SystemExit) as error:
        # SystemExit: a script that was not meant to be imported must not end the run without a word.
        raise PluginError(f"{kind} plug-in {path!r}: importing {module_name!r} failed: {error!r}") from error
    try:
        found: object = module
        for name in attribute.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        public = [name for name in vars(module) if not name.startswith("_")]
        close = get_close_matches(attribute, public, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PluginError(f"{kind} plug-in {path!r}: {module_name!r} has no {attribute!r}.{hint}") from error
    return found


def make_importable(search_paths: Sequence[str]) -> None:
    """Put the user's folders, in order, at the front of the import path, for good: a plug-in may import lazily."""
    folders = dict.fromkeys(str(Path(path).expanduser().resolve()) for path in search_paths)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()


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
                "none": "retrain.advantages.spec:NONE",
                "gtpo": "retrain.advantages.spec:GTPO",
                "gtpo_hicra": "retrain.advantages.spec:GTPO_HICRA",
                "gtpo_sepa": "retrain.advantages.spec:GTPO_SEPA",
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
            {"regex": "retrain.planning.regex:RegexDetector", "semantic": "retrain.planning.semantic:SemanticDetector"},
        ),
        Registry(
            "reward",
            "reward",
            {
                "match": "retrain.rewards.match:MatchReward",
                "math": "retrain.rewards.math:MathReward",
                "judge": "retrain.rewards.judge:JudgeReward",
                "custom": "retrain.rewards.custom:CustomReward",
            },
        ),
        Registry(
            "data",
            "data source",
            {
                "math": "retrain.data.math:MathSource",
                "gsm8k": "retrain.data.gsm8k:Gsm8kSource",
                "arithmetic": "retrain.data.arithmetic:ArithmeticSource",
                "jsonl": "retrain.data.jsonl:JsonlSource",
                "hub": "retrain.data.hub:HubSource",
            },
        ),
        Registry(
            "engine",
            "inference engine",
            {
                "pytorch": "retrain.inference_engine.pytorch:build",
                "max": "retrain.inference_engine.max:build",
                "vllm": "retrain.inference_engine.http:vllm",
                "sglang": "retrain.inference_engine.http:sglang",
                "mlx": "retrain.inference_engine.http:mlx",
                "openai": "retrain.inference_engine.http:openai",
            },
        ),
        Registry(
            "environment",
            "environment provider",
            {
                "builtin": "retrain.environments.builtin:load",
                "verifiers": "retrain.environments.verifiers:load",
                "reasoning_gym": "retrain.environments.reasoning_gym:load",
            },
        ),
        Registry(
            "backend",
            "backend",
            {"local": "retrain.backends.local:build", "tinker": "retrain.backends.tinker:build"},
        ),
    )
}
