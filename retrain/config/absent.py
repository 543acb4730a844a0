"""Options that load and are checked although the part behind them is not in this version."""

from __future__ import annotations

from retrain.config.options import options_by_path
from retrain.config.rules import values_of
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_value
from retrain.errors import ConfigError, Problem
from retrain.plugins import REGISTRIES

# Any value but the default is refused before a run starts; nothing is accepted and ignored.
ABSENT: tuple[str, ...] = ()


def find_absent_parts(config: TrainConfig) -> list[Problem]:
    """What this configuration asks for that cannot be had."""
    if config.kind == "squeeze":
        # It reads its own table; the others are of the run whose adapter it is.
        return []
    values, options = values_of(config), options_by_path()
    problems = [
        _problem(options[path].where, values[path], f"Leave it at {format_value(options[path].default)}.")
        for path in ABSENT
        if values[path] != options[path].default
    ]
    for path, option in options.items():
        name = values.get(path)
        if option.kind and name in REGISTRIES[option.kind].reserved:
            problems.append(_problem(option.where, name, f"It has: {', '.join(REGISTRIES[option.kind].names())}."))
    return problems


def refuse_absent_parts(config: TrainConfig) -> None:
    """Raise one error for all of them, if there are any."""
    problems = find_absent_parts(config)
    if problems:
        raise ConfigError("this configuration cannot be run:", tuple(problems))


def _problem(where: str, value: object, hint: str) -> Problem:
    return Problem(where, f"= {format_value(value)} is not in this version of retrain.", hint)
