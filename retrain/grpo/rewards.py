"""Reward functions of a YAML run: retrain's by name, and the user's own functions."""

from __future__ import annotations

import functools
from typing import Any

from retrain.config.schema import Reward as RewardSection
from retrain.data.rows import gsm8k_answer
from retrain.errors import ConfigError, PluginError
from retrain.plugins import import_path, make_importable
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
        items = [Item(text, gsm8k_answer(str(one)) or str(one)) for text, one in zip(texts, answer, strict=True)]
        return [score.value if score.counts else None for score in self.pool.score(items)]

    def close(self) -> None:
        """End the worker processes."""
        if "pool" in vars(self):
            self.pool.close()
            del self.pool


def load_rewards(given: str | list[str] | None) -> list[Any]:
    """Reward functions: retrain's by name, `module:function` from the working directory or an installed package."""
    names = [given] if isinstance(given, str) else given or []
    make_importable((".",))
    try:
        return [import_path(name, "reward") if ":" in name else NamedReward(name) for name in names]
    except PluginError as error:
        raise ConfigError(f"reward_funcs: {error}") from error
