"""Conditions that are not measured alike: scored, sampled or evaluated otherwise, or with inputs that were edited."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set

from retrain.config import TrainConfig
from retrain.config.options import free_on_resume, options_by_path, paths_where, replace_values, values_of
from retrain.config.schema import AS_IN_TRAINING
from retrain.config.toml import show_value
from retrain.config.unused import why_unused
from retrain.data.order import is_same_digest
from retrain.plugins import REGISTRIES
from retrain.runtime.text import list_some
from retrain.types import JsonObject

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
# What completions depend on besides the weights.
_SAMPLING = tuple(
    f"training.{key}" for key in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
)
# A teacher's completion is correct if the student's answer is; other options of [teaching] only change its reward.
_STUDENT = tuple(f"teaching.{key}" for key in ("enabled", "student_model", "student_with_teaching_template"))
# What an evaluation depends on, whatever its problems.
_ASKED = {"data.system_prompt", "eval.samples"}

Inputs = Mapping[str, str]
"""Digests of what a run has read, by what it is."""


def find_unlike(
    configs: Mapping[str, TrainConfig], baseline: str, metric: str, inputs: Mapping[str, Inputs] | None = None
) -> dict[str, str]:
    """The conditions of which a metric is not measured as that of the baseline, with the options that differ.

    With their inputs, the same problems are recognized in another file, or in a part of one.
    """
    if metric not in SCORED:
        return {}
    first, problems = configs[baseline], {}
    for name, read in (inputs or {}).items():
        problems[name] = named_inputs(read, configs[name]).get("data.path")
    found = {}
    for name, config in configs.items():
        own, its = problems.get(name), problems.get(baseline)
        same = {}
        if own is not None and own == its:
            same = {"data.path": first.data.path, "training.max_examples": first.training.max_examples}
        elif None in (own, its) and os.path.realpath(config.data.path) == os.path.realpath(first.data.path):
            same = {"data.path": first.data.path}
        found[name] = _differences(_measured_by(first, metric), _measured_by(replace_values(config, same), metric))
    return {name: text for name, text in found.items() if text}


def find_other_evaluations(configs: Mapping[str, TrainConfig], baseline: str) -> dict[str, str]:
    """The conditions whose options name other held-out problems than those of the baseline, or ask otherwise."""
    evaluated = {name: config for name, config in configs.items() if config.eval.every}
    if baseline not in evaluated:
        return {}
    first = evaluated[baseline]
    found = {name: _differing_options(first, one, _evaluation_options(one)) for name, one in evaluated.items()}
    return {name: text for name, text in found.items() if text}


def describe_other_evaluation(one: TrainConfig, other: TrainConfig, of_same_problems: bool) -> str:
    """The options by which two evaluations differ, with both values; or "". Problems may have come from two places."""
    paths = _ASKED if of_same_problems else paths_where("held_out") - {"eval.temperature"}
    return _differing_options(one, other, paths)


def read_inputs(state: JsonObject, config: TrainConfig) -> Inputs:
    """What trainer_state.json says of the inputs of a run: user code, models, data and options that were changed."""
    code, models, data = state.get("code") or {}, state.get("models") or {}, state.get("data")
    found = {f"the code of {name}": str(digest) for name, digest in code.items()}
    found |= {f"the files of {name}": repr(digests) for name, digests in models.items()}
    if data:
        # Other options name other data; only what they name may have been edited.
        named = repr((config.data, config.environment, config.training.max_examples))
        found[f"the training data\n{named}"] = str(data)
    return found | {"the options of a forced resume": repr(state.get("forced") or [])}


def named_inputs(inputs: Inputs, config: TrainConfig) -> dict[str, str]:
    """The digests of data and models that options name by their place, by option."""
    data = next((digest for name, digest in inputs.items() if name.startswith("the training data\n")), None)
    found = {
        "data.path": data if config.data.path else None,
        "model.model": inputs.get(f"the files of {config.model.model}"),
        "teaching.student_model": inputs.get(f"the files of {config.teaching.student_model}"),
    }
    return {option: digest for option, digest in found.items() if digest}


def edited_inputs(one: Inputs, other: Inputs) -> list[str]:
    """The inputs that both have and that are not the same."""
    return [
        name.partition("\n")[0] for name, digest in one.items() if not is_same_digest(other.get(name, digest), digest)
    ]


def _evaluation_options(config: TrainConfig) -> Set[str]:
    """The options that decide about held-out problems: those of [data] as far as the problems come from there."""
    reads = REGISTRIES["data"].reads
    unread = {f"data.{key}" for key in ("path", "id", "subset") if not reads(config.held_out_source, key)}
    if config.eval.source:
        unread.add("data.source")
    if config.eval.source or config.eval.path:
        unread.add("data.path")
    return paths_where("held_out") - unread - {"eval.temperature"}


def _measured_by(config: TrainConfig, metric: str) -> dict[str, object]:
    """What a metric that is made of rewards depends on besides the weights, by name; only what is in use."""
    options, values = options_by_path(), values_of(config)
    student = {path for path in options if path.startswith("teaching.")} if metric == "mean_reward" else set(_STUDENT)
    scoring = {path for path, option in options.items() if option.section in ("reward", "environment")}
    always = set(_SAMPLING)
    if not metric.startswith("eval_"):
        # Rates in training are of the training problems.
        always |= {"training.max_examples", *(path for path, option in options.items() if option.section == "data")}
    paths = [path for path in values if path in (scoring | student) - free_on_resume() or path in always]
    found = {options[path].where: values[path] for path in paths if not why_unused(options[path], config)}
    if metric.startswith("eval_"):
        found.pop(options["training.temperature"].where, None)
        is_same = config.eval.temperature == AS_IN_TRAINING
        used = config.training.temperature if is_same else config.eval.temperature
        found["the temperature of evaluations (see [eval] temperature)"] = used
    return found


def _differences(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    # Options that only one of them uses follow from others, as a custom module from a type.
    names = [name for name in differing if name in one and name in other] or differing
    return list_some([f"{name} is {_show(other, name)} instead of {_show(one, name)}" for name in names])


def _show(values: Mapping[str, object], name: str) -> str:
    return show_value(values[name]) if name in values else "not used"


def _differing_options(one: TrainConfig, other: TrainConfig, paths: Set[str]) -> str:
    before, after = (
        {options_by_path()[p].where: v for p, v in values_of(c).items() if p in paths} for c in (one, other)
    )
    return _differences(before, after)
