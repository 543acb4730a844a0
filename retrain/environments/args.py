"""`[environment] args` of an environment that declares them as a pydantic model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from retrain.config import schema
from retrain.errors import ConfigError, ConfigIssue


class Args(BaseModel):
    """Arguments of one environment: strictly typed, no unknown names."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


A = TypeVar("A", bound=Args)


def read_args(model: type[A], section: schema.Environment) -> A:
    """Validate `args`; one error lists all problems."""
    try:
        return model.model_validate(section.args)
    except ValidationError as error:
        problems = tuple(_problem(model, detail["loc"], detail["type"], detail["msg"]) for detail in error.errors())
    raise ConfigError(f"[environment] id = {section.id!r} cannot take these args:", problems)


def _problem(model: type[Args], place: tuple[int | str, ...], kind: str, text: str) -> ConfigIssue:
    where = f"[environment] args.{'.'.join(map(str, place))}"
    if kind != "extra_forbidden":
        return ConfigIssue(where, f"is not valid: {text}.")
    close = get_close_matches(str(place[-1]), list(model.model_fields), n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(model.model_fields) or 'none'}."
    return ConfigIssue(where, "is unknown.", hint)


def check_names(args: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise for unknown arguments; one error lists all of them."""
    problems = []
    for name in args:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}."
            problems.append(
                ConfigIssue("[environment] args", f"has {name!r}, which the environment does not take.", hint)
            )
    if problems:
        raise ConfigError("the environment's arguments are wrong:", tuple(problems))
