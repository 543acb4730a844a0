"""Rules about campaigns."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from retrain.config.options import (
    Option,
    all_options,
    condition_overrides,
    name_in_condition,
    option_issue,
    options_by_path,
)
from retrain.config.schema import TrainConfig
from retrain.config.synonyms import find_synonym
from retrain.config.tables.run import FIRST_LOOK
from retrain.config.toml import format_value
from retrain.errors import ConfigIssue


def check_conditions(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Conditions override options that may differ between runs; no condition or seed occurs twice."""
    if config.campaign is None:
        return
    options = options_by_path()
    for index, condition in enumerate(config.campaign.conditions):
        where = f"[campaign] conditions[{index}]"
        if not condition:
            yield ConfigIssue(where, "is empty.", 'Try: advantage_mode = "grpo"')
        for path, _ in condition_overrides(condition):
            if path not in options:
                text = f"sets {path[:60]!r}, which is not an option that a condition can override."
                meant = _find_meant(path)
                yield ConfigIssue(where, text, f"Did you mean {name_in_condition(meant)}?" if meant else "")
            elif options[path].facets.per_condition is False:
                yield ConfigIssue(where, f"sets {path}, which is the same for all conditions.")
    labels = [format_value(dict(sorted(condition_overrides(c)))) for c in config.campaign.conditions]
    if len(set(labels)) < len(labels):
        yield option_issue("campaign.conditions", "holds the same condition twice.")
    if len(set(config.campaign.seeds)) < len(config.campaign.seeds):
        yield option_issue("campaign.seeds", "holds the same seed twice.")


def _find_meant(path: str) -> Option | None:
    """The option that a key of a condition may stand for: of this name, then a similar one, first in its table."""
    given, _, key = path[:60].rpartition(".")
    table = next(iter(get_close_matches(given.lower(), TrainConfig.model_fields, n=1)), given)
    options = [option for option in all_options() if option.facets.per_condition is not False]
    synonym = find_synonym(path)
    candidates = [option for option in options if option.key == key or option == synonym]
    candidates.sort(key=lambda option: option.section != table)
    for some in ([option for option in options if option.section == table], options):
        close = get_close_matches(key, [option.key for option in some], n=1)
        candidates += [option for option in some if [option.key] == close]
    return candidates[0] if candidates else None


def check_campaign(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Options of a campaign agree with each other."""
    campaign = config.campaign
    if campaign is None:
        return
    if campaign.gpus_per_run > 1 and campaign.gpus_per_run != int(campaign.gpus_per_run):
        text = f"is {campaign.gpus_per_run}; above 1 Ray gives whole GPUs."
        yield option_issue("campaign.gpus_per_run", text, "Try: 2.0")
    if campaign.share_model and (campaign.parallel or campaign.executor != "local"):
        yield option_issue(
            "campaign.share_model",
            "steps the runs in turn in one process on this machine.",
            'Try: parallel = false and executor = "local"',
            ("campaign",),
        )
    if campaign.stop_when and len(campaign.conditions) < 2:
        text = "compares conditions, and there is only one."
        yield option_issue("campaign.stop_when", text, 'Try: stop_when = ""', ("campaign",))
    if campaign.stop_when and len(campaign.seeds) <= FIRST_LOOK:
        seeds = f"tests from {FIRST_LOOK} seeds on and needs more than that; there are {len(campaign.seeds)}."
        text = f'= "{campaign.stop_when}" {seeds}'
        yield option_issue("campaign.stop_when", text, 'Try: more seeds, or stop_when = ""', ("campaign",))
