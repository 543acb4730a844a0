"""Names of options in other tools, such as TRL, transformers and vLLM."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import cache

from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options


@cache
def synonyms() -> dict[str, Option]:
    """Options by their names in other tools; a name with a table, such as `model.name`, is one in that table only."""
    return {name: option for option in all_options() for name in option.facets.synonyms or ()}


@cache
def _names() -> dict[str, Option]:
    """Options by their names in other tools, and by those of their flags that are not just their keys."""
    flags = {option.flag.lstrip("-").replace("-", "_"): option for option in all_options()}
    return {name: option for name, option in flags.items() if name != option.key} | synonyms()


def find_synonym(name: str) -> Option | None:
    """The option that a name in another tool, or a flag given as a key, stands for; with or without its table."""
    path = name.lstrip("-").replace("-", "_")
    key = path if path in _names() else path.rpartition(".")[2]
    close = get_close_matches(key[:60], _names(), n=1, cutoff=0.9)
    return _names()[close[0]] if close else None


def find_meant_flags(typed: str) -> list[str]:
    """The flags that a wrong one may stand for: of one that other tools call so, and of options with this key."""
    key = typed.lstrip("-").replace("-", "_").rpartition(".")[2]
    same = [option for option in all_options() if option.key == key and option.section not in OPTIONAL_SECTIONS]
    synonym = find_synonym(typed)
    # Several options with this key say less than the synonym.
    meant = [*([synonym] if synonym else []), *(same if not synonym or len(same) == 1 else [])]
    return list(dict.fromkeys(option.flag for option in meant))


def find_same_option(name: str, known: Collection[str]) -> str:
    """The name among `known`, such as the settings of TRL, of the option that is named; "" if there is none."""
    flag = f"--{name.replace('_', '-')}"
    meant = [
        option
        for option in all_options()
        if name == option.key or flag == option.flag or synonyms().get(name) == option
    ]
    names = [other for option in meant for other in (option.key, *(option.facets.synonyms or ()))]
    return next((other for other in names if other in known), "")
