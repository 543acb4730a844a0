"""Conditions that are not measured alike: scored by other rewards, or evaluated on other problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from retrain.config import TrainConfig
from retrain.config.options import free_on_resume, options_by_path, paths_where, values_of
from retrain.config.toml import show_value
from retrain.plugins import REGISTRIES

CORRECT_RATES = ("correct_rate", "running_correct_rate", "eval_pass_at_1", "eval_pass_at_k")
SCORED = (
    *CORRECT_RATES,
    "mean_reward",
    "eval_ci_low",
    "eval_ci_high",
    "groups_all_wrong",
    "student_accuracy",
    "improvement_rate",
    "degradation_rate",
)
"""Metrics that are made of rewards."""
_TABLES = ("reward", "environment", "teaching")
# What an evaluation depends on, whatever its problems.
_ASKED = {"data.system_prompt", "eval.samples", "eval.temperature"}


def find_other_scoring(configs: Mapping[str, TrainConfig], baseline: str) -> dict[str, str]:
    """The conditions whose completions are scored by other options than those of the baseline, and the options."""
    scoring = {path for path, option in options_by_path().items() if option.section in _TABLES} - free_on_resume()
    return _describe(configs, baseline, lambda _: scoring)


def find_other_evaluations(configs: Mapping[str, TrainConfig], baseline: str) -> dict[str, str]:
    """The conditions whose options name other held-out problems than those of the baseline, or ask otherwise."""
    evaluated = {name: config for name, config in configs.items() if config.eval.every}
    return _describe(evaluated, baseline, _evaluation_options) if baseline in evaluated else {}


def describe_other_evaluation(one: TrainConfig, other: TrainConfig, of_same_problems: bool) -> str:
    """An option by which two evaluations differ, with both values; or "". Problems may have come from two places."""
    return _first_difference(one, other, _ASKED if of_same_problems else paths_where("held_out"))


def _evaluation_options(config: TrainConfig) -> Set[str]:
    """The options that decide about an evaluation: those of [data] as far as its problems come from there."""
    unread = {
        f"data.{key}" for key in ("path", "id", "subset") if not REGISTRIES["data"].reads(config.held_out_source, key)
    }
    if config.eval.source:
        unread.add("data.source")
    if config.eval.source or config.eval.path:
        unread.add("data.path")
    return paths_where("held_out") - unread


def _describe(
    configs: Mapping[str, TrainConfig], baseline: str, options: Callable[[TrainConfig], Set[str]]
) -> dict[str, str]:
    first = configs[baseline]
    found = {name: _first_difference(first, config, options(config)) for name, config in configs.items()}
    return {name: text for name, text in found.items() if text}


def _first_difference(one: TrainConfig, other: TrainConfig, paths: Set[str]) -> str:
    before, after = values_of(one), values_of(other)
    path = next((path for path in before if path in paths and before[path] != after[path]), None)
    if path is None:
        return ""
    return f"{options_by_path()[path].where} is {show_value(after[path])} instead of {show_value(before[path])}"
