"""Rules that a configuration is validated by. Each is a function that yields the issues it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from retrain.config.rules.campaigns import check_campaign, check_conditions
from retrain.config.rules.data import (
    check_data_source,
    check_eval_temperature,
    check_greedy_samples,
    check_held_out_file,
    check_held_out_split,
    check_pass_at_k,
)
from retrain.config.rules.models import (
    check_batch_size_bounds,
    check_dropout,
    check_full_training,
    check_micro_batches,
    check_sampling_device,
    check_sharding,
    check_student_weights,
)
from retrain.config.rules.paths import check_paths
from retrain.config.rules.rewards import (
    check_correct_from,
    check_custom_rewards,
    check_environment,
    check_penalties,
    check_teaching_advantage,
    check_teaching_data,
)
from retrain.config.rules.schedule import check_schedule
from retrain.config.rules.urls import check_judge_url, check_urls
from retrain.config.rules.values import (
    check_devices,
    check_group_size,
    check_init_kwargs,
    check_launch_device,
    check_names,
    check_ratio_cap,
    check_strategic_grams,
    check_templates,
    check_toml_values,
)
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue

Rule = Callable[[TrainConfig], Iterator[ConfigIssue]]

RULES: tuple[Rule, ...] = (
    check_names,
    check_toml_values,
    check_devices,
    check_launch_device,
    check_group_size,
    check_eval_temperature,
    check_init_kwargs,
    check_schedule,
    check_ratio_cap,
    check_urls,
    check_paths,
    check_strategic_grams,
    check_templates,
    check_judge_url,
    check_conditions,
    check_campaign,
    check_sharding,
    check_dropout,
    check_full_training,
    check_micro_batches,
    check_sampling_device,
    check_custom_rewards,
    check_correct_from,
    check_environment,
    check_teaching_data,
    check_teaching_advantage,
    check_penalties,
    check_student_weights,
    check_data_source,
    check_pass_at_k,
    check_greedy_samples,
    check_held_out_file,
    check_held_out_split,
    check_batch_size_bounds,
)


def find_issues(config: TrainConfig, known: Iterable[ConfigIssue] = ()) -> list[ConfigIssue]:
    """Issues that the rules find in addition to those already known.

    A table with a known issue holds a default in place of a value of the user, so an issue that compares its options is
    dropped; an issue with a single value is kept.
    """
    known = tuple(known)
    reported = {issue.where for issue in known}
    unreliable = {table for issue in known for table in issue.tables}
    found = [issue for rule in RULES for issue in rule(config)]
    return [issue for issue in found if issue.where not in reported and not unreliable.intersection(issue.tables)]
