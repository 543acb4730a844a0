"""The conditions of a campaign: which options each one overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.config.options import all_options
from retrain.config.schema import TrainConfig


def condition_overrides(condition: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """A condition as `section.key` overrides; a bare key belongs to the first table that has it."""
    homes = {option.key: option.path for option in reversed(all_options())}
    for key, value in condition.items():
        # `model` and `backend` are tables as well as options; neither option takes a table.
        if isinstance(value, Mapping) and (key in TrainConfig.model_fields or key not in homes):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield homes.get(key, key), value
