"""Rules about rewards, environments and teaching."""

from __future__ import annotations

import json
from collections.abc import Iterator

from retrain.config.options import option_issue
from retrain.config.schema import Reward, RewardTerm, TrainConfig
from retrain.config.toml import show_value
from retrain.errors import ConfigIssue
from retrain.plugins import REGISTRIES, is_dotted_path, suggest_module


def check_custom_rewards(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A custom reward, or a custom term, names its module, not a file."""
    reward = config.reward
    for index, term in enumerate(reward.terms):
        yield from _check_custom(f"[reward] terms[{index}].", term)
    if not reward.terms:
        yield from _check_custom("[reward] ", reward)


def _check_custom(where: str, reward: Reward | RewardTerm) -> Iterator[ConfigIssue]:
    module, _, function = reward.custom_module.partition(":")
    if reward.type == "custom" and not reward.custom_module:
        text, hint = 'is empty, but type is "custom".', 'Try: custom_module = "my_rewards"'
        yield ConfigIssue(f"{where}custom_module", text, hint, ("reward",))
    elif reward.type == "custom" and (hint := suggest_module(module)):
        text = f"= {show_value(reward.custom_module)} names a file instead of a module."
        hint += f", and custom_function = {show_value(function)}" if function else ""
        yield ConfigIssue(f"{where}custom_module", text, hint, ("reward",))
    elif reward.type == "custom" and ":" in reward.custom_module:
        text = f"= {show_value(reward.custom_module)} names a function, too."
        hint = f"Try: custom_module = {show_value(module)} and custom_function = {show_value(function)}"
        yield ConfigIssue(f"{where}custom_module", text, hint, ("reward",))


def check_correct_from(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Built-in rewards are at most 1 each; their weighted sum must be able to reach what counts as correct."""
    reward = config.reward
    known = all(term.type in REGISTRIES["reward"].parts and term.type != "custom" for term in reward.terms)
    most = sum(max(term.weight, 0.0) for term in reward.terms)
    if reward.terms and known and not config.environment.provider and most < reward.correct_from - 1e-9:
        yield option_issue(
            "reward.correct_from",
            f"= {reward.correct_from:g} is more than the terms can add up to ({most:g}).",
            f"Try: correct_from = {most:g}",
            ("reward", "environment"),
        )


def check_environment(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A provider needs an id, and a rollout at least one turn."""
    environment = config.environment
    # A dotted path is the user's own class, configured by args.
    if environment.provider and not environment.id and not is_dotted_path(environment.provider):
        yield option_issue(
            "environment.id",
            f"is empty, but provider is {json.dumps(environment.provider)}.",
            {"builtin": 'Try: id = "guess-number"', "reasoning_gym": 'Try: id = "chain_sum"'}.get(
                environment.provider, 'Try: id = "primeintellect/gsm8k"'
            ),
            ("environment",),
        )
    if environment.max_turns == 0:
        yield option_issue("environment.max_turns", "must be -1 or at least 1, got 0.", "Try: max_turns = -1")


def check_teaching_data(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A student answers problems of [data], not an environment."""
    if config.teaching.enabled and config.environment.provider:
        yield option_issue(
            "teaching.enabled",
            "does not go with an [environment]: the student answers problems of [data], scored by [reward].",
            "Try: enabled = false",
            ("teaching", "environment"),
        )


def check_teaching_advantage(config: TrainConfig) -> Iterator[ConfigIssue]:
    """maxrl divides by the mean reward of a group, which harmful teaching makes negative.

    The conditions of a campaign are validated one by one.
    """
    teaching = config.teaching
    penalizes = teaching.enabled and teaching.degradation_penalty_multiplier
    if penalizes and _uses_maxrl(config) and config.campaign is None:
        yield option_issue(
            "algorithm.advantage_mode",
            '= "maxrl" divides by the mean reward, which can be negative with [teaching] enabled.',
            'Try: advantage_mode = "grpo"',
            ("algorithm", "teaching"),
        )


def check_penalties(config: TrainConfig) -> Iterator[ConfigIssue]:
    """maxrl divides by the mean reward of a group, which terms with a negative weight make negative.

    The conditions of a campaign are validated one by one.
    """
    if not _uses_maxrl(config) or config.campaign is not None or config.environment.provider:
        return
    for index, term in enumerate(config.reward.terms):
        if term.weight < 0:
            yield ConfigIssue(
                f"[reward] terms[{index}].weight",
                f"= {show_value(term.weight)} can make rewards negative, and "
                '[algorithm] advantage_mode = "maxrl" divides by their mean.',
                'Try: advantage_mode = "grpo"',
                ("reward", "algorithm", "environment"),
            )


def _uses_maxrl(config: TrainConfig) -> bool:
    return config.algorithm.advantage_mode == "maxrl" and not config.algorithm.algorithm_mode
