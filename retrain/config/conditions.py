"""The conditions of a campaign: which options each one overrides, and the rule that they must be real and distinct."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from retrain.config.options import all_options, options_by_path
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_value
from retrain.errors import ConfigIssue


def conditions_override_real_options(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Each key of a condition is an option's name, or a table of them; conditions and seeds must differ."""
    if config.campaign is None:
        return
    keys = list(dict.fromkeys(option.key for option in all_options()))
    for index, condition in enumerate(config.campaign.conditions):
        where = f"[campaign] conditions[{index}]"
        if not condition:
            yield ConfigIssue(where, "is empty.", 'Try: advantage_mode = "grpo"')
        for path, _ in condition_overrides(condition):
            if path not in options_by_path() or path.startswith(("campaign.", "resume.", "squeeze.")):
                close = get_close_matches(path.rpartition(".")[2][:60], keys, n=1)
                hint = f"Did you mean {close[0]}?" if close else ""
                yield ConfigIssue(
                    where, f"sets {path[:60]!r}, which is not an option that a condition can override.", hint
                )
    labels = [format_value(dict(sorted(condition_overrides(c)))) for c in config.campaign.conditions]
    if len(set(labels)) < len(labels):
        yield ConfigIssue("[campaign] conditions", "holds the same condition twice.")
    if len(set(config.campaign.seeds)) < len(config.campaign.seeds):
        yield ConfigIssue("[campaign] seeds", "holds the same seed twice.")


def condition_overrides(condition: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A condition as `section.key` overrides; a bare key belongs to the first table that has it."""
    homes = {option.key: option.path for option in reversed(all_options())}
    for key, value in condition.items():
        # `model` and `backend` are tables as well as options; neither option takes a table.
        if isinstance(value, Mapping) and (key in TrainConfig.model_fields or key not in homes):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield homes.get(key, key), value
