"""Rules that a configuration is validated by: every `check_` function of these modules yields the issues it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from retrain.config.rules import campaigns, data, models, rewards, schedule, urls, values
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue

Rule = Callable[[TrainConfig], Iterator[ConfigIssue]]

MODULES = (values, urls, schedule, campaigns, models, rewards, data)
RULES: tuple[Rule, ...] = tuple(
    function for module in MODULES for name, function in vars(module).items() if name.startswith("check_")
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
