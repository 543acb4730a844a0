"""Code of the user that a configuration names, examined without importing it.

Plugins and environments: the module exists. Custom rewards: the function has the expected signature, too. The training
process never imports a reward's module, and its worker processes, which report what cannot be seen in the source, start
seconds later.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from retrain.config import TrainConfig
from retrain.config.options import Option
from retrain.config.rules.values import named_parts
from retrain.config.schema import Reward, RewardTerm
from retrain.config.unused import why_unused
from retrain.errors import ConfigIssue
from retrain.isolation.sources import find_source, find_spec, is_findable
from retrain.plugins import REGISTRIES, import_path, is_dotted_path, is_plugin, split_path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Of a reward function: the response and the reference.
_ARGUMENTS = 2
_IMPORTS = (ast.Import, ast.ImportFrom)


def find_missing_plugins(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Parts whose module does not exist, and an environment that its provider does not have."""
    search_paths = config.plugins.search_paths
    for where, kind, option, name in named_parts(config):
        is_named = is_plugin(kind, name) and is_dotted_path(name) and name not in REGISTRIES[kind].discovered()
        module = split_path(name)[0]
        if is_named and _is_loaded(option, config) and not is_findable(module, search_paths):
            yield _missing_module(where, name, module, search_paths)
    provider = config.environment.provider
    if target := REGISTRIES["environment"].facts(provider).explains_missing:
        explain: Any = import_path(target, "environment")
        if issue := explain(config.environment, search_paths):
            yield issue


def _is_loaded(option: Option, config: TrainConfig) -> bool:
    """Whether the run will load the part that an option names; options may be kept for when it is used again."""
    if option.path == "eval.source" and not config.eval.every:
        return False
    return not why_unused(option, config) and (option.path != "planning.detector" or uses_detector(config))


def uses_detector(config: TrainConfig) -> bool:
    """Whether the run will load `[planning] detector`; not known for a transform of the user."""
    mode, registry = config.algorithm.transform_mode, REGISTRIES["transform"]
    if config.algorithm.algorithm_mode or is_plugin("transform", mode):
        return bool(config.algorithm.algorithm_mode)
    spec: Any = registry.load(mode)
    return bool(spec.needs_planning)


def _missing_module(where: str, name: str, module: str, search_paths: Sequence[str]) -> ConfigIssue:
    folders = [Path(folder).expanduser().absolute() for folder in search_paths]
    looked = f" (looked in {', '.join(map(str, folders))})" if folders else ""
    what = "such module" if name == module else f"module {module!r}"
    return ConfigIssue(
        where, f"= {json.dumps(name)}: there is no {what}{looked}.", _suggest_module(module, search_paths)
    )


def find_reward_issues(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Custom rewards whose module or function does not exist, or whose function is one for TRL."""
    if config.environment.provider:
        return
    reward = config.reward
    terms: list[Reward | RewardTerm] = [*reward.terms] or [reward]
    for index, term in enumerate(terms):
        where = f"[reward] terms[{index}]." if reward.terms else "[reward] "
        if term.type == "custom" and term.custom_module:
            if not is_findable(term.custom_module, config.plugins.search_paths):
                module = term.custom_module
                yield _missing_module(f"{where}custom_module", module, module, config.plugins.search_paths)
            elif file := find_source(term.custom_module, config.plugins.search_paths):
                yield from _check_function(f"{where}custom_function", term.custom_function, file)


def _suggest_module(module: str, search_paths: Sequence[str]) -> str:
    name, *inner = module.split(".")
    if not all(part.replace("-", "_").isidentifier() for part in (name, *inner)):
        return 'Try: the name of a module, such as "my_rewards" for my_rewards.py'
    if inner and (package := find_spec(name, search_paths)):
        files = [file for folder in package.submodule_search_locations or () for file in Path(folder).glob("*.py")]
        close = get_close_matches(".".join(inner), [file.stem for file in files], n=1)
        what = "module" if package.submodule_search_locations is None else "package"
        return f"Did you mean '{name}.{close[0]}'?" if close else f"The {what} {name} has no {'.'.join(inner)}."
    if os.path.isfile(f"{name}.py"):
        longer = json.dumps([*search_paths, "."])
        return f"It is in the working directory.  Try: [plugins] search_paths = {longer}"
    folders = [Path(folder).expanduser() for folder in search_paths]
    inside = sorted(file.parent.name for folder in folders for file in folder.glob(f"*/{name}.py"))
    if packages := [package for package in inside if package.isidentifier()]:
        return f"Did you mean '{packages[0]}.{module}'?"
    files = [file for folder in folders for file in (*folder.glob("*.py"), *folder.glob("*/__init__.py"))]
    names = [file.parent.name if file.name == "__init__.py" else file.stem for file in files]
    if close := get_close_matches(module, names, n=1):
        return f"Did you mean {close[0]!r}?"
    where = f"into {search_paths[0]}" if search_paths and search_paths[0] != "." else "here"
    return f"Try: put {name}.py {where}, or add its folder to [plugins] search_paths"


def _check_function(where: str, name: str, file: Path) -> Iterator[ConfigIssue]:
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return
    outermost = name.split(".")[0]
    found = next((node for node in body if isinstance(node, _DEFINITIONS) and node.name == outermost), None)
    known = _defined_names(body)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        every = found.args
        if "completions" in [each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)]:
            text = f"= {json.dumps(name)} takes a list of completions, like TRL's reward functions."
            hint = f"Try: def {name}(response, reference), which scores one response; `retrain grpo` accepts TRL's"
            yield ConfigIssue(where, text, hint)
        elif (
            not found.decorator_list and every.vararg is None and len(every.posonlyargs) + len(every.args) < _ARGUMENTS
        ):
            text = f"= {json.dumps(name)} does not take a response and a reference."
            yield ConfigIssue(where, text, f"Try: def {name}(response, reference)")
    elif found is None and known is not None and outermost not in known:
        close = get_close_matches(outermost, known, n=1)
        own = sorted(node.name for node in body if isinstance(node, _DEFINITIONS))
        hint = f"Did you mean {close[0]!r}?" if close else f"It defines {', '.join(own) or 'no function'}."
        yield ConfigIssue(where, f"= {json.dumps(name)}: {file.name} has no such function.", hint)


def _defined_names(body: Sequence[ast.stmt]) -> set[str] | None:
    """The names that a module defines; None if they cannot all be seen in its source."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, _IMPORTS):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None
    return None if names & {"*", "__getattr__"} else names
