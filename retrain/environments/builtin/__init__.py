"""Environments that need no download: single-turn, multi-turn, and with a tool."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from retrain.config import schema
from retrain.environments import Environment, Log, Provider
from retrain.environments.builtin.arithmetic import Arithmetic
from retrain.environments.builtin.calculator import Calculator
from retrain.environments.builtin.guess_number import GuessNumber
from retrain.errors import ConfigError, ConfigIssue

BUILTIN: dict[str, Provider] = {"arithmetic": Arithmetic, "guess-number": GuessNumber, "calculator": Calculator}


def load(section: schema.Environment, log: Log) -> Environment:
    """The provider `builtin`: build the environment named by its id."""
    if issue := explain_missing(section):
        raise ConfigError(str(issue))
    return BUILTIN[section.id](section, log)


def explain_missing(section: schema.Environment, search_paths: Sequence[str] = ()) -> ConfigIssue | None:
    """An issue if there is no such environment."""
    if section.id in BUILTIN:
        return None
    close = get_close_matches(section.id, list(BUILTIN), n=1)
    hint = f'Did you mean "{close[0]}"?' if close else f"Known: {', '.join(BUILTIN)}."
    return ConfigIssue("[environment] id", f'= "{section.id}" is not a built-in environment.', hint)
