"""Options that are set and have no effect: each is a note."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from retrain.config.options import Option, all_options, ignored_on_tinker, values_of
from retrain.config.rules.schedule import unused_arguments
from retrain.config.schema import RewardTerm, TrainConfig

# Some options get no note although they can be without effect:
#   [gtpo] [hicra] [sepa], [loss] clip_low and clip_high, [algorithm] uncertainty_kind, [planning] detector: settings
#     of a method. Methods are compared by changing one switch, in the file or by a flag, and keeping the rest.
#   [eval] with every = 0, [logging] wandb_* without a project, [campaign] max_workers and stagger_seconds without
#     parallel: kept for when it is switched on again; the switch is next to them.
#   [training], [model] and so on in a squeeze file: the file of the run with one more table.
#     A flag that is given for such a file does get one.

USED_BY_SQUEEZE = ("model.base_url", "model.lora_rank", "resume.from")
"""Options outside of [squeeze] that an analysis reads or rejects."""


@dataclass(frozen=True)
class Note:
    """An option that is set and not used, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where} is not used: {self.reason}"


def unused_options(config: TrainConfig, given: Collection[str] = ()) -> Iterator[Note]:
    """Options that are set and not used by a run; for a campaign, those that no condition can make use of.

    Those `given` as flags are set even if they have their default value.
    """
    values = values_of(config)
    for option in all_options():
        if option.path in values and (values[option.path] != option.default or option.path in given):
            reason = why_unused(option, config)
            if not reason and option.path in given:
                reason = _why_not_squeezed(option, config)
            if reason:
                yield Note(option.where, reason)
    if config.campaign is None:
        yield from _unused_keys(config)


def why_unused(option: Option, config: TrainConfig) -> str:
    """Why an option has no effect, or "" if it has one."""
    facets = option.facets
    if config.campaign is not None:
        return facets.in_campaign(config) if facets.in_campaign else ""
    if ignored_on_tinker(option) and config.backend.backend == "tinker":
        return "[backend] backend is tinker"
    return facets.unused(config) if facets.unused else ""


def _why_not_squeezed(option: Option, config: TrainConfig) -> str:
    """Why a flag has no effect on the analysis of an adapter, or ""."""
    is_used = option.section == "squeeze" or option.path in USED_BY_SQUEEZE
    return "" if is_used or config.kind != "squeeze" else "[squeeze] adapter_path is set, so nothing is trained"


def _unused_keys(config: TrainConfig) -> Iterator[Note]:
    """Keys inside options that are tables."""
    for name in unused_arguments(config.optimizer):
        yield Note(f"[optimizer] schedule_args.{name}", f"[optimizer] schedule is {config.optimizer.schedule}")
    function = RewardTerm.model_fields["custom_function"].default
    for index, term in enumerate(config.reward.terms):
        if term.type != "custom":
            for key, is_set in (("module", term.custom_module != ""), ("function", term.custom_function != function)):
                if is_set:
                    yield Note(f"[reward] terms[{index}].custom_{key}", f"its type is {term.type}")
