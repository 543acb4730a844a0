"""Digests of the code that a configuration names: rewards, plugins, and what they import. By them edits are noticed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from types import ModuleType
from weakref import WeakKeyDictionary

from retrain.config import TrainConfig
from retrain.config.options import all_options, values_of
from retrain.config.schema import Reward, RewardTerm
from retrain.environments.remote import named_modules
from retrain.isolation.sources import read_sources
from retrain.plugins import module_of_plugin

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
    plugins = {module_of_plugin(kind, name) for kind, name in named if kind}
    rewards = {term.custom_module for term in terms if term.type == "custom"}
    modules = sorted(plugins | rewards | named_modules(config.environment))
    found = {module: _digest(module, config.plugins.search_paths) for module in modules if module}
    for module in plugins & found.keys() & sys.modules.keys():
        found[module] = _IMPORTED.setdefault(sys.modules[module], found[module])
    return {module: digest for module, digest in found.items() if digest}


def _digest(module: str, search_paths: Sequence[str]) -> str:
    """A digest of its source and, after a ~, of what it imports, if there is anything; empty if there is no source."""
    own, imported = read_sources(module, search_paths)
    files = {source.path: source.text for source in own.values()}
    # A file may be imported by several names.
    others = {source.path: source.text for source in imported.values() if source.path not in files}
    texts = [b"".join(each.values()) for each in (files, others) if each]
    return "~".join(hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts)
