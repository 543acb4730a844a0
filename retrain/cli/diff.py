"""`retrain diff A B`: two runs or two conditions, metric by metric, with the first step where they diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.cli.console import FiniteRange, print_heading, print_json, print_table
from retrain.config.options import paths_where
from retrain.config.toml import show_value
from retrain.errors import ConfigError
from retrain.runtime.text import plural
from retrain.types import JsonObject

if TYPE_CHECKING:
    from retrain.analysis.runs import RunRecord

# Timings differ even between runs that are otherwise identical.
_TIMINGS = ("_time_s", "latency_s", "tokens_per_s", "bp_throughput", "bp_utilization")

Values = Mapping[str, Mapping[int, object]]


@dataclass(frozen=True)
class MetricDifference:
    """One metric at the last step where both sides have it. `first_step` is None where they never diverge."""

    metric: str
    first_step: int | None
    step: int
    """The step of `a` and `b`; evaluations have other steps than training."""
    a: float | str | None
    b: float | str | None
    largest: float | None
    largest_step: int | None


@click.command("diff", context_settings={"max_content_width": 110})
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--tolerance", type=FiniteRange(0), default=0.0, show_default=True, help="Ignore smaller differences.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(a: str, b: str, tolerance: float, as_json: bool) -> int:
    """Compare A with B: two run folders, or two conditions of a campaign as CAMPAIGN/CONDITION.

    Conditions are averaged over the seeds that both have.

    \b
    The JSON has these keys:
      a, b     the two sides
      seeds    seeds that both have
      config   options that differ
      inputs   code, models and data that were edited between runs
      notes    edits of the runs' files
      steps    number of each side, shared, last_shared
      only_in  metrics that only one side has
      metrics  metric, first_step, step (that of a and b), a, b, largest,
               largest_step
    """
    if math.isnan(tolerance):
        raise click.BadParameter("nan is not a number.", param_hint="--tolerance")
    data = diff(find_side(a), find_side(b), tolerance)
    if as_json:
        print_json({**data, "metrics": [asdict(metric) for metric in data["metrics"]]})
    else:
        _print(data)
    return 0


def find_side(given: str) -> list[RunRecord]:
    """The runs of a folder or of CAMPAIGN/CONDITION; all must have the same condition."""
    from retrain.analysis.runs import find_runs  # noqa: PLC0415  (slow to import)
    from retrain.storage.logs import MANIFEST  # noqa: PLC0415

    path = Path(given)
    if path.is_dir():
        runs = find_runs([path])
        names = list(dict.fromkeys(run.condition for run in runs))
        if len(names) > 1:
            raise ConfigError(f"{given} contains several conditions.  Try: {path / names[0]}")
        return runs
    if (path.parent / MANIFEST).is_file():
        runs = find_runs([path.parent])
        mine = [run for run in runs if run.condition == path.name]
        if not mine:
            names = list(dict.fromkeys(run.condition for run in runs))
            raise ConfigError(f"{path.parent} has no condition {path.name!r}.  Try: one of {', '.join(names)}")
        # A run that failed before its first step has nothing to compare.
        return [run for run in mine if run.metrics] or mine
    raise ConfigError(f"there is no folder {given}.")


def diff(a: Sequence[RunRecord], b: Sequence[RunRecord], tolerance: float = 0.0) -> JsonObject:
    """Everything that `retrain diff` prints, under the keys that its help lists."""
    from retrain.analysis.runs import config_differences, describe_records  # noqa: PLC0415  (slow to import)

    seeds: list[int] = []
    if len(a) > 1 or len(b) > 1:
        seeds = sorted({run.seed for run in a} & {run.seed for run in b})
        if not seeds:
            raise ConfigError("the two conditions have no seed in common, so their means cannot be compared.")
        a, b = ([run for run in side if run.seed in seeds] for side in (a, b))
    pairs = [(x, y) for x in a for y in b if x.seed == y.seed or not seeds]
    one, other = mean_values(a), mean_values(b)
    # Evaluations are logged after the last step, too.
    trained = [[series for name, series in side.items() if not name.startswith("eval_")] for side in (one, other)]
    steps = [sorted({step for series in side for step in series}) for side in trained]
    shared = sorted(set(steps[0]) & set(steps[1]))
    if not shared:
        raise ConfigError("the two sides have no step in common.")
    metrics = [compare_series(name, one[name], other[name], tolerance) for name in one if name in other]
    config = {
        path: {"a": _plain(before), "b": _plain(after)}
        for path, (before, after) in config_differences(a[0].config, b[0].config).items()
        if path not in paths_where("identity") or (path == "training.seed" and not seeds)
    }
    return {
        "a": [str(run.path) for run in a],
        "b": [str(run.path) for run in b],
        "seeds": seeds,
        "config": config,
        "inputs": list(dict.fromkeys(name for pair in pairs for name in _find_edited(*pair))),
        "notes": describe_records([*a, *b]),
        "steps": {"a": len(steps[0]), "b": len(steps[1]), "shared": len(shared), "last_shared": shared[-1]},
        "only_in": {"a": sorted(one.keys() - other.keys()), "b": sorted(other.keys() - one.keys())},
        "metrics": [m for m in metrics if m is not None],
    }


def _find_edited(one: RunRecord, other: RunRecord) -> list[str]:
    """Inputs that are not the same, and the problems of the last evaluations."""
    from retrain.analysis.change import find_other_setup  # noqa: PLC0415
    from retrain.analysis.scoring import describe_other_evaluation, edited_inputs  # noqa: PLC0415

    found = edited_inputs(one.inputs, other.inputs)
    # Other options name other problems.
    is_asked_alike = not describe_other_evaluation(one.config, other.config, of_same_problems=False)
    if one.evaluations and other.evaluations and is_asked_alike:
        last = (list(run.evaluations.values())[-1] for run in (one, other))
        found += ["the held-out problems"] if "problems" in find_other_setup(*last) else []
    return found


def mean_values(runs: Sequence[RunRecord]) -> Values:
    """Every metric by step: of one run, or the mean over several runs at steps that all have."""
    gathered: dict[str, dict[int, list[object]]] = {}
    for run in runs:
        # Evaluation metrics are in both files; metrics.jsonl takes precedence, except after the last step.
        for step, row in run.metrics.items():
            for key, value in row.items():
                if key != "step":
                    gathered.setdefault(key, {}).setdefault(step, []).append(value)
        for step, row in run.evaluations.items():
            for key, value in row.items():
                if key.startswith("eval_") and step not in run.metrics:
                    gathered.setdefault(key, {}).setdefault(step, []).append(value)
    if len(runs) == 1:
        return {key: {step: found[0] for step, found in series.items()} for key, series in gathered.items()}
    return {
        key: {
            step: sum(numbers) / len(runs)
            for step, found in series.items()
            if len(numbers := [value for value in found if isinstance(value, int | float)]) == len(runs)
        }
        for key, series in gathered.items()
    }


def compare_series(
    name: str, one: Mapping[int, object], other: Mapping[int, object], tolerance: float
) -> MetricDifference | None:
    """Where two series diverge; None where they share no step. Strings and nulls have no size of difference."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    gaps = {step: _gap(one[step], other[step]) for step in shared}
    differing = [step for step in shared if gaps[step] > tolerance]
    numbers = [step for step in differing if gaps[step] != float("inf")]
    widest = max(numbers, key=lambda step: gaps[step]) if numbers else None
    last = shared[-1]
    return MetricDifference(
        metric=name,
        first_step=differing[0] if differing else None,
        step=last,
        a=_printable(one[last]),
        b=_printable(other[last]),
        largest=gaps[widest] if widest is not None else None,
        largest_step=widest,
    )


def _gap(one: object, other: object) -> float:
    if one == other:
        return 0.0
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return float("inf")


def _printable(value: object) -> float | str | None:
    return float(value) if isinstance(value, int | float) else value if isinstance(value, str) else None


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _print(data: JsonObject) -> None:
    for side, runs in (("a", data["a"]), ("b", data["b"])):
        many = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        click.echo(f"{side.upper()}: {runs[0]}{many}, {plural(data['steps'][side], 'step')}")
    if data["seeds"]:
        click.echo(f"Means over seeds {', '.join(map(str, data['seeds']))}")
    print_heading("Options that differ")
    rows = [(path, show_value(pair["a"]), show_value(pair["b"])) for path, pair in data["config"].items()]
    print_table(("option", "A", "B"), rows or [("none", "", "")])
    for name in data["inputs"]:
        click.echo(f"Edited between the runs: {name}.")
    for note in data["notes"]:
        click.echo(note)
    differing = [m for m in data["metrics"] if m.first_step is not None and not m.metric.endswith(_TIMINGS)]
    differing.sort(key=lambda m: m.first_step or 0)
    print_heading("Metrics that differ, by the first step where they diverge; values at the last step that both have")
    table = [
        (m.metric, f"step {m.first_step}", f"step {m.step}", _show(m.a), _show(m.b), _widest(m)) for m in differing
    ]
    columns = ("metric", "first step", "values at", "A", "B", "max difference")
    table = table or [("none", "", "", "", "", "")]
    print_table(columns, table, header=True)
    equal = [m.metric for m in data["metrics"] if m.first_step is None and not m.metric.endswith(_TIMINGS)]
    click.echo(f"\nEqual at every step: {', '.join(equal) or 'none'}.")
    for side in ("a", "b"):
        if data["only_in"][side]:
            click.echo(f"Only in {side.upper()}: {', '.join(data['only_in'][side])}.")
    click.echo("Times are not compared: they differ even between equal runs (--json has them).")


def _show(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _widest(m: MetricDifference) -> str:
    return f"{m.largest:.3g} at step {m.largest_step}" if m.largest is not None else ""
