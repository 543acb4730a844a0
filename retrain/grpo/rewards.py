"""Reward functions of a YAML run: retrain's by name, and the user's own functions."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from retrain.config.schema import Reward as RewardSection
from retrain.data.order import write_number
from retrain.data.rows import gsm8k_answer, kind_of
from retrain.errors import ConfigError, PluginError
from retrain.plugins import import_path, is_dotted_path, make_importable, split_path
from retrain.rewards import BatchReward, Item, build_reward


class NamedReward:
    """One of retrain's rewards as a TRL reward function: compares completions with the column `answer`."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @functools.cached_property
    def pool(self) -> BatchReward:
        """The worker processes, started for the first batch."""
        return build_reward(RewardSection(type=self.__name__))

    def __call__(self, completions: list[Any], answer: list[Any] | None = None, **columns: Any) -> list[float | None]:
        """The rewards of a batch; None where a completion could not be scored."""
        if answer is None:
            raise ConfigError(f"reward_funcs: {self.__name__} needs reference answers.  Try: answer_column=…")
        texts = [each if isinstance(each, str) else each[-1]["content"] or "" for each in completions]
        pairs = zip(texts, answer, strict=True)
        items = [Item(text, gsm8k_answer(text_of(one)) or text_of(one)) for text, one in pairs if one is not None]
        scores = iter(self.pool.score(items))
        # A completion without an answer is not scored, as one whose scoring failed.
        found = [None if one is None else next(scores) for one in answer]
        return [score.value if score is not None and score.counts else None for score in found]

    def close(self) -> None:
        """End the worker processes."""
        if "pool" in vars(self):
            self.pool.close()
            del self.pool


def text_of(answer: object) -> str:
    """An answer as text. A column with 2 and 2.5 holds 2.0, which is the answer 2."""
    return write_number(answer) if isinstance(answer, float) else str(answer)


def load_rewards(given: str | list[str] | None) -> list[Any]:
    """Reward functions: retrain's by name, or `module:function`, from the working directory or an installed package.

    A dotted path, as TRL's scripts take it, is such a function or a plugin of retrain.
    """
    names = [given] if isinstance(given, str) else given or []
    make_importable((".",))
    try:
        functions = [_load(name) for name in names]
    except PluginError as error:
        raise ConfigError(f"reward_funcs: {error}") from error
    for name, function in zip(names, functions, strict=True):
        _check_signature(name, function)
    return functions


def _load(name: str) -> Any:
    if ":" in name:
        return import_path(name, "reward")
    if is_dotted_path(name) and _is_for_trl(function := import_path(name, "reward")):
        return function
    return NamedReward(name)


def _is_for_trl(function: Any) -> bool:
    try:
        return not {"completions", "prompts"}.isdisjoint(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a reward that is no function, or written in C
        return False


def _check_signature(name: str, function: Any) -> None:
    """Raise unless this is a function that takes what TRL passes: prompts, completions and columns."""
    if not callable(function):
        raise ConfigError(f"reward_funcs: {name} is {kind_of(function)}, not a function.")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # written in C; TRL may still call it
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if not takes_all and not {"prompts", "completions"}.issubset(parameters):
        raise ConfigError(
            f"reward_funcs: {name} takes {', '.join(parameters) or 'nothing'}; TRL passes prompts, completions and the "
            "columns of the dataset, and expects a list with one number per completion.  "
            f"Try: def {split_path(name)[1]}(completions, answer, **columns)"
        )
