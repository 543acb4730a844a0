"""The runs of a campaign: their names, folders and configurations. Starts nothing and writes nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from retrain.analysis.scoring import find_other_evaluations, find_unlike
from retrain.checks.processes import check_single_process
from retrain.config import TrainConfig
from retrain.config.load import build_condition
from retrain.config.options import (
    all_options,
    condition_overrides,
    free_on_resume,
    name_in_condition,
    namesakes,
    options_by_path,
    paths_where,
    values_of,
)
from retrain.config.schema import Campaign, Training
from retrain.errors import ConfigError, ConfigIssue
from retrain.losses import build_loss
from retrain.losses.averages import Average
from retrain.plugins import is_plugin
from retrain.runtime.text import list_some
from retrain.schedules.learning_rate import find_long_warmup

RUNS = "runs"
# Names become folders, wandb groups and tags, which restrict characters and length.
_UNSAFE = re.compile(r"[^A-Za-z0-9.+=_-]+")
_LONGEST_LABEL = 60
_RATIO_OPTIONS = {"loss.type", "loss.clip_low", "loss.clip_high", "loss.ratio_cap"}
_OF_A_RUN = {
    "backend.adapter_path",
    *(f"logging.{key}" for key in ("log_dir", "wandb_run_name", "wandb_group", "wandb_tags")),
}


@dataclass(frozen=True)
class Run:
    """One condition with one seed."""

    name: str
    condition: str
    seed: int
    folder: Path
    config: TrainConfig

    @property
    def max_steps(self) -> int:
        """Training steps of the run."""
        return self.config.training.max_steps


def runs_at_once(campaign: Campaign, runs: int) -> int:
    """How many runs are under way at a time. Those that share a model take turns: only one of them steps."""
    if not campaign.parallel and not campaign.share_model:
        return 1
    return min(campaign.max_workers or runs, runs)


def plan_runs(config: TrainConfig, folder: Path, source: str) -> list[Run]:
    """All runs, ordered by seed, so that pairs of conditions are complete early."""
    campaign = config.campaign
    assert campaign is not None
    conditions, steps = _build_conditions(config, campaign, source)
    for condition in conditions:
        check_single_process(condition)
    labels = label_conditions(conditions, campaign.conditions)
    trained = [
        condition.model_copy(update={"training": _training(condition, 0, most)})
        for condition, most in zip(conditions, steps, strict=True)
    ]
    for (first, one), (second, other) in combinations(enumerate(trained, start=1), 2):
        if one == other:
            raise ConfigError(
                f"{source}: campaign conditions {first} and {second} are the same run: what one adds, the other has "
                "anyway.  Try: remove one"
            )
    runs = [
        _build_run(condition.model_copy(update={"training": _training(condition, seed, most)}), label, folder)
        for seed in campaign.seeds
        for condition, label, most in zip(conditions, labels, steps, strict=True)
    ]
    if campaign.share_model:
        _require_shared_model(runs)
    return runs


def split_conditions(config: TrainConfig, source: str) -> dict[str, TrainConfig]:
    """A campaign of each condition alone, whose file has its options, by name; a single run is itself, under "".

    Its `max_workers` are the runs of the whole campaign at a time. The analysis of an adapter trains nothing, so there
    is none.
    """
    if config.kind == "squeeze":
        return {}
    campaign = config.campaign
    if campaign is None:
        return {"": config}
    conditions, steps = _build_conditions(config, campaign, source)
    labels = label_conditions(conditions, campaign.conditions)
    at_once = runs_at_once(campaign, len(conditions) * len(campaign.seeds))
    return {
        label: condition.model_copy(
            update={
                "campaign": campaign.model_copy(
                    update={"conditions": (table,), "max_steps": most, "max_workers": at_once}
                )
            }
        )
        for label, condition, table, most in zip(labels, conditions, campaign.conditions, steps, strict=True)
    }


def _build_conditions(config: TrainConfig, campaign: Campaign, source: str) -> tuple[list[TrainConfig], list[int]]:
    """The configuration of each condition, and its steps."""
    tables = campaign.conditions
    conditions = [
        build_condition(config, table, f"{source}, campaign condition {number}")
        for number, table in enumerate(tables, start=1)
    ]
    own = (dict(condition_overrides(table)).get("training.max_steps") for table in tables)
    return conditions, [campaign.max_steps if most is None else int(str(most)) for most in own]


def name_conditions(problems: Mapping[str, Sequence[str]], conditions: int) -> list[str]:
    """Each problem behind the names of the conditions that have it, unless all of them do."""
    return [text if len(names) == conditions else f"{list_some(names)}: {text}" for text, names in problems.items()]


def find_idle(config: TrainConfig) -> list[str]:
    """Parts of a method that stay off in a whole run."""
    from retrain.advantages.sepa import find_idle_sepa  # noqa: PLC0415  (loads numpy)

    # The number of steps is not known with epochs.
    warmup = "" if config.training.epochs else find_long_warmup(config)
    return [note for note in (find_idle_sepa(config), warmup) if note]


def find_limits(runs: Sequence[Run], campaign: Campaign | None = None) -> list[str]:
    """Notes on what the comparison of these runs cannot tell, and on what the campaign cannot save."""
    if not runs:
        return []
    configs = {run.condition: run.config for run in runs}
    first = next(iter(configs))
    models = dict.fromkeys(config.model.model for config in configs.values())
    notes = [*_find_equal_losses(runs), *(_find_ambiguous_keys(campaign) if campaign is not None else ())]
    if campaign is not None and campaign.stop_when and runs_at_once(campaign, len(runs)) == len(runs):
        notes.append(
            f'all {len(runs)} runs start at once, so stop_when = "{campaign.stop_when}" has none to skip; '
            "[campaign] max_workers limits them"
        )
    if len(models) > 1:
        notes.append(f"conditions train different models ({list_some(list(models))}), and are not compared at the end")
    metric = "eval_pass_at_1" if all(config.eval.every for config in configs.values()) else "correct_rate"
    for name, other in find_unlike(configs, first, metric).items():
        notes.append(
            f"{name} and {first} are not measured alike: {other}; a difference in {metric} may come from that, so "
            "neither is called better"
        )
    for name, other in find_other_evaluations(configs, first).items():
        notes.append(
            f"{name} and {first} are not evaluated alike: {other}; if their held-out problems differ or are asked "
            "otherwise, the conditions are not compared at the end"
        )
    return notes


def _find_ambiguous_keys(campaign: Campaign) -> Iterator[str]:
    """Notes on keys of conditions that might mean an option of another table."""
    for key in dict.fromkeys(key for condition in campaign.conditions for key in condition if "." not in key):
        path = next(path for path, _ in condition_overrides({key: None}))
        option = options_by_path().get(path)
        if option is not None and name_in_condition(option) != key:
            others = " or ".join(name_in_condition(other) for other in namesakes(option) if other != option)
            yield f"{key} in conditions sets {option.where}; to set another: {others}"


def _find_equal_losses(runs: Sequence[Run]) -> list[str]:
    """Notes on conditions that only treat ratios in another way, if every ratio is 1."""
    notes = []
    for one, other in combinations({run.condition: run for run in runs}.values(), 2):
        first, second = values_of(one.config), values_of(other.config)
        differing = {path for path in first if first[path] != second[path] and path not in _OF_A_RUN}
        if differing <= _RATIO_OPTIONS and _plain_average(one.config) == _plain_average(other.config) is not None:
            notes.append(
                f"{one.condition} and {other.condition} differ only in [loss], and a step is trained on once, with the "
                "weights that sampled it: ratios are 1 up to the rounding of the sampler, so clipping hardly acts, and "
                "the updates are nearly the same"
            )
    return notes


def _plain_average(config: TrainConfig) -> Average | None:
    """What decides the gradient of a loss whose ratios are all 1; None if there is more to it, or ratios differ."""
    is_stale = "," in config.backend.devices or (config.training.async_steps and config.samples_separately)
    if is_stale or is_plugin("loss", config.loss.type):
        return None
    loss = build_loss(config.loss)
    return loss.average if loss.is_plain_on_policy else None


def _require_shared_model(runs: Sequence[Run]) -> None:
    """Raise when these runs cannot share a model."""
    first = values_of(runs[0].config)
    problems = []
    if first["backend.backend"] != "local" or "," in first["backend.devices"]:
        problems.append(ConfigIssue("[campaign] share_model", "needs the local backend on one device."))
    if first["inference.engine"] != "pytorch":
        problems.append(ConfigIssue("[campaign] share_model", 'needs [inference] engine = "pytorch".'))
    if first["model.lora_rank"] == 0:
        problems.append(ConfigIssue("[campaign] share_model", "shares frozen weights; [model] lora_rank = 0 has none."))
    for run in {run.condition: run for run in runs}.values():
        values = values_of(run.config)
        for path in (path for path in values if path in paths_where("shared_model") and values[path] != first[path]):
            text = f"needs one {path}: {run.condition} has {values[path]!r}, {runs[0].condition} has {first[path]!r}."
            problems.append(ConfigIssue("[campaign] share_model", text))
    if problems:
        raise ConfigError("the runs cannot share a model:", tuple(problems))


def label_conditions(conditions: Sequence[TrainConfig], overrides: Sequence[Mapping[str, object]]) -> list[str]:
    """A name for each condition: its algorithm, and what else it overrides that stays fixed when runs are resumed.

    It does not depend on other conditions, which may then be left out or added, unless all of that is the same.
    """
    others = [{path: f"_{_short(path)}={value}" for path, value in sorted(_others(table))} for table in overrides]
    fixed = [
        condition.condition + "".join(text for path, text in own.items() if path not in free_on_resume())
        for condition, own in zip(conditions, others, strict=True)
    ]
    labels: list[str] = []
    for condition, own, name in zip(conditions, others, fixed, strict=True):
        full = condition.condition + "".join(own.values())
        label = _UNSAFE.sub("-", full if fixed.count(name) > 1 else name)
        if len(label) > _LONGEST_LABEL or label in labels:
            digest = hashlib.sha256(full.encode()).hexdigest()[:8]
            label = f"{label[: _LONGEST_LABEL - 9]}_{digest}"
        labels.append(label)
    return labels


def _others(table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    algorithm = ("algorithm.advantage_mode", "algorithm.transform_mode", "algorithm.algorithm_mode")
    return ((path, value) for path, value in condition_overrides(table) if path not in algorithm)


def _short(path: str) -> str:
    key = path.rpartition(".")[2]
    return key if sum(option.key == key for option in all_options()) == 1 else path


def _training(condition: TrainConfig, seed: int, steps: int) -> Training:
    return condition.training.model_copy(update={"seed": seed, "max_steps": steps, "epochs": 0.0})


def _build_run(config: TrainConfig, label: str, folder: Path) -> Run:
    """Give a condition with its seed its name and folders."""
    seed, logging = config.training.seed, config.logging
    name = f"{label}_s{seed}"
    run_folder = folder / RUNS / name
    tags = ",".join(filter(None, (logging.wandb_tags, label, f"seed{seed}")))
    per_run = {"log_dir": str(run_folder), "wandb_run_name": name, "wandb_group": label, "wandb_tags": tags}
    update = {
        "backend": config.backend.model_copy(update={"adapter_path": str(run_folder / "adapter")}),
        "logging": logging.model_copy(update=per_run),
    }
    return Run(name, label, seed, run_folder, config.model_copy(update=update))
