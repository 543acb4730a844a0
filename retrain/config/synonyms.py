"""Names of options in other tools, such as TRL, transformers and vLLM."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache

from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options


@cache
def synonyms() -> dict[str, Option]:
    """Options by their names in other tools; a name with a table, such as `model.name`, is one in that table only."""
    return {name: option for option in all_options() for name in option.facets.synonyms or ()}


def find_synonym(name: str) -> Option | None:
    """The option that a key or a flag of another tool stands for, with or without its table."""
    path = name.lstrip("-").replace("-", "_")
    key = path if path in synonyms() else path.rpartition(".")[2]
    close = get_close_matches(key[:60], synonyms(), n=1, cutoff=0.9)
    return synonyms()[close[0]] if close else None


def find_meant_flags(typed: str) -> list[str]:
    """The flags that a wrong one may stand for: of options with this key, or of one that other tools call so."""
    key = typed.lstrip("-").replace("-", "_").rpartition(".")[2]
    same = [option for option in all_options() if option.key == key and option.section not in OPTIONAL_SECTIONS]
    synonym = find_synonym(typed) if len(same) != 1 else None
    return [option.flag for option in ([synonym] if synonym else same)]
