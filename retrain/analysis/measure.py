"""A metric of several runs at one step, and which runs have it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TypeGuard

from retrain.analysis.runs import RunRecord, describe_records
from retrain.analysis.scoring import describe_other_evaluation, find_unlike, named_inputs
from retrain.data.order import is_same_digest
from retrain.errors import ConfigError
from retrain.runtime.text import list_some, plural


@dataclass(frozen=True)
class Measured:
    """A metric of each run, at a step that all of them reached."""

    metric: str
    step: int
    values: Mapping[str, Mapping[int, float]]
    """Values by condition and seed, for `retrain.analysis.stats.compare`."""
    notes: tuple[str, ...] = field(default=())


def default_metric(runs: Sequence[RunRecord]) -> str:
    """The held-out pass rate if every run has one, else the correct rate in training."""
    return "eval_pass_at_1" if all(run.is_evaluated for run in runs) else "correct_rate"


def explain_metric(runs: Sequence[RunRecord]) -> list[str]:
    """A note if only some runs were evaluated, so that the default metric is that of training."""
    without = [run.path.name for run in runs if not run.is_evaluated]
    if not without or len(without) == len(runs):
        return []
    evaluated = {run.condition for run in runs if run.is_evaluated}
    hint = " --metric eval_pass_at_1 leaves them out." if len(evaluated) > 1 else ""
    return [f"Compared by {default_metric(runs)}: no evaluation of {list_some(without)}.{hint}"]


def measure(runs: Sequence[RunRecord], metric: str, last: int = 10) -> Measured:
    """A metric of each run at the last common step; training metrics are a mean over the `last` steps up to it.

    Evaluations before training, at step 0, are never compared.
    """
    notes: list[str] = []
    empty = [run for run in runs if not run.rows(metric)]
    if empty:
        what = "evaluation" if metric.startswith("eval_") else "step"
        raise ConfigError(f"{empty[0].path} has no {what} yet, so it has no {metric}.  Try: leave it out")
    last = 1 if metric.startswith("eval_") else last
    found = [_measured_at(run, metric, last) for run in runs]
    common = set.intersection(*found)
    if metric.startswith("eval_") and all(found):
        # Step 0 is before any training, where conditions do not differ.
        common.discard(0)
        if not common:
            raise ConfigError(
                f"there is no common evaluation after training ({_describe_evaluations(runs, metric)}).  "
                "Try: leave out the runs that ended earlier, or retrain compare FOLDER --metric correct_rate"
            )
    if not common:
        known = sorted(
            {k for run in runs for row in run.rows(metric).values() for k, v in row.items() if _is_number(v)}
        )
        close = [] if metric in known else get_close_matches(metric[:60], known, n=1)
        hint = f"Did you mean {close[0]}?  " if close else ""
        raise ConfigError(f"the runs have no step in common with a {metric}.  {hint}Their metrics: {', '.join(known)}")
    step = max(common)
    ends = sorted({max(run.rows(metric)) for run in runs})
    if len(ends) > 1:
        notes.append(f"The runs have unequal steps (last ones {ends[0]} to {ends[-1]}); compared at step {step}.")
    elif step < ends[0]:
        notes.append(f"Compared at step {step} of {ends[0]}: later, not every run has a {metric}.")
    unfinished = [run.path.name for run in runs if run.status != "finished"]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}.")
    notes += describe_records(runs)
    notes += [f"{run.path}: {plural(run.torn, 'incomplete line')} skipped." for run in runs if run.torn]
    if metric.startswith("eval_"):
        notes += require_same_evaluation(runs, metric, step)
    elif last > 1:
        count = max(sum(step - last < s <= step for s in run.rows(metric)) for run in runs)
        notes.append(f"{metric} is the mean of the last {plural(count, 'step')} up to step {step}.")
    values: dict[str, dict[int, float]] = {}
    missing = []
    for run in runs:
        steps = [s for s in run.rows(metric) if step - last < s <= step]
        numbers = [float(value) for s in steps if _is_number(value := run.rows(metric)[s].get(metric))]
        if len(numbers) < len(steps):
            missing.append(f"{run.path.name} {len(steps) - len(numbers)}")
        values.setdefault(run.condition, {})[run.seed] = sum(numbers) / len(numbers)
    if missing:
        notes.append(f"Steps of them without a {metric}: {list_some(missing)}.")
    return Measured(metric, step, values, tuple(notes))


def leave_out_empty(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The runs that have steps or evaluations, if they are of several conditions; and a note on the others."""
    if not runs:
        raise ConfigError("there is no run with a step yet.  Try: again once the first runs have begun")
    kept = [run for run in runs if run.metrics or run.evaluations]
    if len(kept) == len(runs) or len({run.condition for run in kept}) < 2:
        return list(runs), []
    empty = ", ".join(run.path.name for run in runs if not (run.metrics or run.evaluations))
    return kept, [f"Left out, without any step: {empty}."]


def leave_out_unlike(runs: Sequence[RunRecord], metric: str, baseline: str | None) -> tuple[list[RunRecord], list[str]]:
    """If the runs have no common evaluation after training, those with one to compare with the baseline; and notes.

    The step is the one with the most pairs of runs with the same seed, and of those the last.
    """
    steps = {run.path: _measured_at(run, metric) for run in runs}
    if not metric.startswith("eval_") or set.intersection(*steps.values()) - {0}:
        return list(runs), []
    first = baseline if any(run.condition == baseline for run in runs) else runs[0].condition
    seeds: dict[int, set[int]] = {}
    """Seeds of the baseline that were evaluated at each step."""
    for run in runs:
        for step in steps[run.path] - {0} if run.condition == first else ():
            seeds.setdefault(step, set()).add(run.seed)

    def paired(step: int) -> list[str]:
        found = (run for run in runs if step in steps[run.path] and run.seed in seeds[step])
        return [run.condition for run in found if run.condition != first]

    step = max(seeds, key=lambda step: (len(paired(step)), step), default=0)
    names = {first, *paired(step)} if seeds else set()
    if len(names) < 2:
        return list(runs), []
    kept = [run for run in runs if step in steps[run.path] and run.condition in names]
    without = [run for run in runs if step not in steps[run.path]]
    alone = dict.fromkeys(run.condition for run in runs if step in steps[run.path] and run.condition not in names)
    notes = [f"Left out, without an evaluation at step {step}: {_describe_left_out(without, kept, metric)}."]
    if alone:
        notes.append(f"Left out, without a seed of {first} at step {step}: {', '.join(alone)}.")
    return kept, notes


def _measured_at(run: RunRecord, metric: str, last: int = 1) -> set[int]:
    """The steps with a number for the metric among the `last` steps up to them; there is none without a score."""
    found, newest = set(), -math.inf
    for step, row in run.rows(metric).items():
        if _is_number(row.get(metric)):
            newest = step
        if step - newest < last:
            found.add(step)
    return found


def _describe_left_out(runs: Sequence[RunRecord], kept: Sequence[RunRecord], metric: str) -> str:
    """The evaluations of these runs; single runs of a condition that is kept are named with their seeds."""
    in_part = {run.condition for run in kept}
    single = [replace(run, condition=f"{run.condition} seed {run.seed}") for run in runs if run.condition in in_part]
    return _describe_evaluations([*single, *(run for run in runs if run.condition not in in_part)], metric)


def _describe_evaluations(runs: Sequence[RunRecord], metric: str) -> str:
    """The steps at which each condition was evaluated, and the seeds of it that differ from most."""
    named: dict[str, list[str]] = {}
    for condition in dict.fromkeys(run.condition for run in runs):
        seeds: dict[tuple[int, ...], list[int]] = {}
        for run in runs:
            if run.condition == condition:
                seeds.setdefault(tuple(sorted(_measured_at(run, metric))), []).append(run.seed)
        usual, *others = sorted(seeds, key=lambda steps: (len(seeds[steps]), steps[-1:]), reverse=True)
        text = f"{'step' if len(usual) == 1 else 'steps'} {_list_steps(usual)}" if usual else "none"
        rest = [f"{_list_seeds(seeds[steps])}: {_list_steps(steps) or 'none'}" for steps in others]
        named.setdefault(text + (f" ({'; '.join(rest)})" if rest else ""), []).append(condition)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in named.items())


def _list_steps(steps: Sequence[int]) -> str:
    numbers = [str(step) for step in steps]
    return ", ".join(numbers if len(numbers) <= 6 else [*numbers[:3], "…", *numbers[-2:]])


def _list_seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, sorted(seeds)))}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def require_same_model(runs: Sequence[RunRecord]) -> None:
    """Raise if the runs train different models."""
    models = sorted({run.config.model.model for run in runs})
    files = {named_inputs(run.inputs, run.config).get("model.model") for run in runs}
    # A folder that was moved has another name.
    is_moved = len(files) == 1 and None not in files
    if len(models) > 1 and not is_moved:
        raise ConfigError(
            f"the runs train different models ({', '.join(models)}), so a difference may not be due to the method.  "
            "Try: retrain compare FOLDER --allow-different-models"
        )


def require_same_evaluation(runs: Sequence[RunRecord], metric: str, step: int) -> list[str]:
    """Raise if the evaluations at a step use different problems; notes on different sampling."""
    rows = [(run.path, run.evaluations[step]) for run in runs]
    # The same file may have had other contents. Older rows do not name their problems.
    named = [(path, row["problems"]) for path, row in rows if "problems" in row]
    for run in runs[1:]:
        if other := describe_other_evaluation(runs[0].config, run.config, len(named) == len(rows)):
            raise ConfigError(
                f"{run.path} was evaluated differently from {runs[0].path}: {other}.  "
                "Try: retrain compare FOLDER --metric correct_rate"
            )
    differing = next((path for path, problems in named if not is_same_digest(problems, named[0][1])), None)
    if differing is not None:
        raise ConfigError(
            f"{differing} and {named[0][0]} were evaluated on different problems at step {step}.  "
            "Try: retrain compare FOLDER --metric correct_rate"
        )
    if metric == "eval_pass_at_k" and len(found := {row.get("k") for _, row in rows}) > 1:
        raise ConfigError(f"the runs have different k in pass@k: {', '.join(sorted(map(str, found)))}.")
    drawn = {json.dumps(row["sampling"], sort_keys=True) for _, row in rows if "sampling" in row}
    # What the options tell is said of each condition; an evaluation may have had options of an earlier session.
    is_told = find_unlike({str(run.path): run.config for run in runs}, str(runs[0].path), metric)
    return ["The runs were evaluated with different sampling options."] if len(drawn) > 1 and not is_told else []


def problem_rates(runs: Sequence[RunRecord], step: int) -> list[list[float]] | None:
    """The correct rate of each held-out problem, one row per run; None if they were not stored."""
    rows = [run.evaluations.get(step) for run in runs]
    counted = [row.get("counted") if row else None for row in rows]
    # A problem whose scoring failed in one run is excluded from all.
    if not all(isinstance(c, list) and len(c) == len(counted[0] or ()) for c in counted):
        return None
    keep = [at for at in range(len(counted[0] or ())) if all(c[at] for c in counted if c)]
    return [[row["correct"][at] / row["counted"][at] for at in keep] for row in rows if row]
