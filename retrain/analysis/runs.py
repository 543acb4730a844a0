"""Runs loaded from their folders: configuration, metrics and evaluations, grouped into conditions.

A folder is a run, a campaign (manifest.json), or contains runs. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeGuard

from retrain.analysis.change import Row
from retrain.analysis.scoring import Inputs, describe_other_evaluation, find_unlike, read_inputs
from retrain.config import TrainConfig, load_config
from retrain.config.options import free_on_resume, paths_where, values_of
from retrain.config.toml import format_value, show_value
from retrain.data.order import is_same_digest
from retrain.errors import ConfigError
from retrain.runtime.text import list_some, plural
from retrain.storage.checkpoint import read_state
from retrain.storage.folder import CONFIG_FILE, SEARCH_DEPTH
from retrain.storage.logs import EVALS, MANIFEST, METRICS, has_step, is_evaluation, parse_rows
from retrain.types import JsonObject

_IN_LABELS = {"algorithm.advantage_mode", "algorithm.transform_mode", "algorithm.algorithm_mode"}


@dataclass(frozen=True)
class RunRecord:
    """One run, loaded from its folder. Rows are by step; of a step that was written twice, the last one counts."""

    path: Path
    condition: str
    seed: int
    config: TrainConfig
    metrics: Mapping[int, Row]
    evaluations: Mapping[int, Row]
    status: str = ""
    torn: int = 0
    """Number of lines that could not be read."""
    inputs: Inputs = field(default_factory=dict)
    steps: int = 0
    """Number of steps taken."""
    attempts: tuple[str, ...] = ()
    """Folders of other attempts at this run, which are left out."""

    def rows(self, metric: str) -> Mapping[int, Row]:
        """The rows that contain a metric: evaluations or training steps."""
        return self.evaluations if metric.startswith("eval_") else self.metrics


@dataclass(frozen=True)
class Measured:
    """A metric of each run, at a step that all of them reached."""

    metric: str
    step: int
    values: Mapping[str, Mapping[int, float]]
    """Values by condition and seed, for `retrain.analysis.stats.compare`."""
    notes: tuple[str, ...] = field(default=())


def find_runs(
    paths: Sequence[str | Path], tell_apart: bool = False, read: Callable[[Path], RunRecord] | None = None
) -> list[RunRecord]:
    """All runs in these folders, each with its condition; raises if a run is named twice.

    Two runs with the same condition and seed are an error too, or, with `tell_apart`, named after their folders; but
    attempts that were repeated are left out. `read` loads one run, by default `read_run`.
    """
    runs = label_runs([run for path in paths for run in _find(Path(path).expanduser(), read or read_run)])
    shown = {Path(path).expanduser() for path in paths}
    # A page shows a run that is about to begin.
    shown |= {run.path for run in runs if tell_apart and run.status == "running"}
    runs = _leave_out_attempts(runs, shown)
    folders = Counter(run.path.resolve() for run in runs)
    twice = [str(folder) for folder, count in folders.items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice.")
    if tell_apart:
        repeated = Counter((run.condition, run.seed) for run in runs)
        return [
            replace(run, condition=f"{run.condition} in {run.path}") if repeated[run.condition, run.seed] > 1 else run
            for run in runs
        ]
    pairs: dict[tuple[str, int], RunRecord] = {}
    for run in runs:
        other = pairs.setdefault((run.condition, run.seed), run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} count as the same run: {run.condition} with seed {run.seed}"
                f"{_describe_differences(other.config, run.config)}.  "
                f"Try: leave one out, or compare the two line by line: retrain diff {other.path} {run.path}"
            )
    return runs


def _leave_out_attempts(runs: Sequence[RunRecord], shown: Set[Path]) -> list[RunRecord]:
    """The runs without other attempts at them, except these; each run names those that were left out."""
    same: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        same.setdefault((run.condition, run.seed), []).append(run)
    attempts: dict[Path, list[str]] = {}
    left_out = set()
    for run in runs:
        others = same[run.condition, run.seed] if run.path not in shown else ()
        if kept := next((other for other in others if _is_attempt(run, other)), None):
            attempts.setdefault(kept.path, []).append(run.path.name)
            left_out.add(run.path)
    return [replace(run, attempts=tuple(attempts.get(run.path, ()))) for run in runs if run.path not in left_out]


def _is_attempt(run: RunRecord, other: RunRecord) -> bool:
    """Whether a run is only an attempt at another: it has no step, or was renamed when the other took its folder."""
    renamed = re.fullmatch(rf"{re.escape(other.path.name)}\.\d+", run.path.name)
    return other.steps > 0 and (not run.steps or bool(renamed and run.path.parent == other.path.parent))


def describe_attempts(runs: Sequence[RunRecord]) -> list[str]:
    """Sentences on the attempts that were left out."""
    return [
        f"Left out as another attempt at {run.path.name}: {list_some(run.attempts)}." for run in runs if run.attempts
    ]


def _describe_differences(one: TrainConfig, other: TrainConfig) -> str:
    """The options that make no condition of their own and differ, except those that name or log a run."""
    found = config_differences(one, other).items()
    named = paths_where("identity")
    shown = [f"{p.split('.')[-1]} ({show_value(a)} and {show_value(b)})" for p, (a, b) in found if p not in named]
    return f". What differs is not part of a condition: {', '.join(shown)}" if shown else ""


def _find(path: Path, read: Callable[[Path], RunRecord]) -> list[RunRecord]:
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}.")
    found = list(_search(path, SEARCH_DEPTH, read))
    if not found and not (path / MANIFEST).is_file():
        raise ConfigError(f"{path} is neither a run nor a campaign: it has no {CONFIG_FILE} with {METRICS}.")
    return found


def _search(path: Path, depth: int, read: Callable[[Path], RunRecord]) -> Iterator[RunRecord]:
    """The runs in a folder: itself, those of a campaign, or those in subfolders."""
    if (path / MANIFEST).is_file():
        entries = read_manifest(path)["runs"]
        order = {name: at for at, name in enumerate(dict.fromkeys(entry["condition"] for entry in entries))}
        # By condition: the first one is the baseline, also if its first run is missing.
        for entry in sorted(entries, key=lambda entry: order[entry["condition"]]):
            if _is_run(path / entry["folder"]):
                run = read(path / entry["folder"])
                if run.status == "finished" and run.steps < entry.get("max_steps", 0):
                    run = replace(run, status="interrupted")  # the campaign has got more steps
                yield replace(run, condition=entry["condition"], seed=entry["seed"])
    elif _is_run(path):
        yield read(path)
    elif depth:
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                yield from _search(folder, depth - 1, read)


def _is_run(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and (path / METRICS).is_file()


def read_manifest(path: Path) -> JsonObject:
    """The manifest of a campaign; checks the entries of its runs."""
    try:
        table = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for entry in table["runs"]:
            str(entry["folder"]), str(entry["condition"]), int(entry["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / MANIFEST} is not a valid manifest: {error!r}.") from error
    result: JsonObject = table
    return result


def read_run(path: Path) -> RunRecord:
    """Load one run; incomplete lines are skipped and counted."""
    config = load_config(path / CONFIG_FILE)
    metrics, torn = read_rows(path / METRICS)
    evaluations, torn_too = read_rows(path / EVALS, is_evaluation)
    state = read_state(path)
    return RunRecord(
        path,
        config.condition,
        config.training.seed,
        config,
        metrics,
        evaluations,
        str(state.get("status", "")),
        torn + torn_too,
        read_inputs(state, config),
        max(metrics, default=-1) + 1,
    )


def read_rows(path: Path, is_valid: Callable[[Row], bool] = has_step) -> tuple[dict[int, Row], int]:
    """Valid rows of a JSONL file by step, and the number of other lines."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}, 0
    lines = [line for line in text.split("\n") if line.strip()]
    valid = [row for row in parse_rows(lines) if is_valid(row)]
    rows = {int(row["step"]): row for row in valid}
    return dict(sorted(rows.items())), len(lines) - len(valid)


def label_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Add options to the labels of conditions that have the same label and differ in them."""
    settings = _methods(runs)
    labelled = []
    for run, options in zip(runs, settings, strict=True):
        others = [values for other, values in zip(runs, settings, strict=True) if other.condition == run.condition]
        differing = [path for path in options if any(values.get(path) != options[path] for values in others)]
        # Only the last part of a path, which would make tables too wide.
        extra = "".join(f",{path.split('.')[-1]}={_short(options[path])}" for path in differing)
        labelled.append(replace(run, condition=run.condition + extra))
    return labelled


def find_unlabelled(runs: Sequence[RunRecord], baseline: str) -> list[str]:
    """Sentences on options in which a condition differs from the baseline, and that no label shows."""
    methods = {run.condition: method for run, method in zip(runs, _methods(runs), strict=True)}
    first, found = methods.get(baseline, {}), []
    for name, method in methods.items():
        shown = {path for path in method if any(f"{path.split('.')[-1]}=" in label for label in (name, baseline))}
        differing = [p for p in method if p not in shown | _IN_LABELS and first and method[p] != first.get(p)]
        if differing:
            both = [f"{path} ({_short(method[path])}, {_short(first.get(path))})" for path in differing]
            found.append(f"{name} and {baseline} also differ in {list_some(both)}.")
    return found


def _methods(runs: Sequence[RunRecord]) -> list[dict[str, object]]:
    """The options of each run that are part of its method."""
    # Where, how long and how fast a run went is not, nor is its seed.
    excluded = free_on_resume() | paths_where("identity")
    optimizers = [run.config.optimizer for run in runs]
    if any(each.schedule != "constant" or 0 < each.warmup_steps < 1 for each in optimizers):
        # The learning rate of a step depends on the number of steps.
        excluded -= {"training.max_steps", "training.epochs"}
    return [{p: v for p, v in values_of(run.config).items() if p not in excluded} for run in runs]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else format_value(value)
    return text.rstrip("/").rsplit("/", 1)[-1]


def config_differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[object, object]]:
    """Options that differ, by `section.key`."""
    before, after = values_of(one), values_of(other)
    paths = sorted(before.keys() | after.keys())
    return {p: (before.get(p), after.get(p)) for p in paths if before.get(p) != after.get(p)}


def default_metric(runs: Sequence[RunRecord]) -> str:
    """The held-out pass rate if every run has one, else the correct rate in training."""
    return "eval_pass_at_1" if all(run.evaluations for run in runs) else "correct_rate"


def measure(runs: Sequence[RunRecord], metric: str, last: int = 10) -> Measured:
    """A metric of each run at the last common step; training metrics are a mean over the `last` steps up to it.

    Evaluations before training, at step 0, are never compared.
    """
    notes: list[str] = []
    empty = [run for run in runs if not run.rows(metric)]
    if empty:
        what = "evaluation" if metric.startswith("eval_") else "step"
        raise ConfigError(f"{empty[0].path} has no {what} yet, so it has no {metric}.  Try: leave it out")
    found = [{s for s, row in run.rows(metric).items() if metric in row} for run in runs]
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
        close = get_close_matches(metric[:60], known, n=1)
        hint = f"Did you mean {close[0]}?  " if close else ""
        raise ConfigError(f"the runs have no step in common with a {metric}.  {hint}Their metrics: {', '.join(known)}")
    step = max(common)
    ends = sorted({max(run.rows(metric)) for run in runs})
    if len(ends) > 1:
        notes.append(f"The runs have unequal steps (last ones {ends[0]} to {ends[-1]}); compared at step {step}.")
    unfinished = [run.path.name for run in runs if run.status != "finished"]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}.")
    notes += describe_attempts(runs)
    notes += [f"{run.path}: {plural(run.torn, 'incomplete line')} skipped." for run in runs if run.torn]
    if metric.startswith("eval_"):
        last = 1
        notes += require_same_evaluation(runs, metric, step)
    elif last > 1:
        count = max(sum(step - last < s <= step for s in run.rows(metric)) for run in runs)
        notes.append(f"{metric} is the mean of the last {plural(count, 'step')} up to step {step}.")
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        steps = [s for s in run.rows(metric) if step - last < s <= step]
        numbers = [float(value) for s in steps if _is_number(value := run.rows(metric)[s].get(metric))]
        if numbers and len(numbers) < len(steps):
            without = plural(len(steps) - len(numbers), "step")
            notes.append(f"{run.path.name}: {without} without a {metric}, which no mean contains.")
        if not numbers:
            raise ConfigError(f"{run.path} has no number for {metric} at step {step}.")
        values.setdefault(run.condition, {})[run.seed] = sum(numbers) / len(numbers)
    return Measured(metric, step, values, tuple(notes))


def leave_out_empty(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The runs that have steps or evaluations, if they are of several conditions; and a note on the others."""
    kept = [run for run in runs if run.metrics or run.evaluations]
    if len(kept) == len(runs) or len({run.condition for run in kept}) < 2:
        return list(runs), []
    empty = ", ".join(run.path.name for run in runs if not (run.metrics or run.evaluations))
    return kept, [f"Left out, without any step: {empty}."]


def leave_out_unlike(runs: Sequence[RunRecord], metric: str, baseline: str | None) -> tuple[list[RunRecord], list[str]]:
    """If the runs have no common evaluation after training, those with one to compare with the baseline; and notes.

    The step is the one with the most pairs of runs with the same seed, and of those the last.
    """
    steps = {run.path: _evaluated_at(run, metric) for run in runs}
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


def _evaluated_at(run: RunRecord, metric: str) -> set[int]:
    return {step for step, row in run.rows(metric).items() if metric in row}


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
                seeds.setdefault(tuple(sorted(_evaluated_at(run, metric))), []).append(run.seed)
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
    if len(models) > 1:
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
