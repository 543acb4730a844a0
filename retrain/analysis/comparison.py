"""Comparison of conditions across seeds: the numbers, and their explanation in sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from retrain.analysis.looks import Looks
from retrain.analysis.measure import (
    Measured,
    default_metric,
    explain_metric,
    leave_out_empty,
    leave_out_unlike,
    measure,
    problem_rates,
)
from retrain.analysis.runs import RunRecord, find_unlabelled, read_manifest
from retrain.analysis.scoring import CORRECT_RATES, SCORED, edited_inputs, find_unlike
from retrain.analysis.stats import (
    Comparison,
    Interval,
    NoiseFloor,
    ProblemComparison,
    compare,
    compare_problems,
    noise_floor,
    why_no_bootstrap,
)
from retrain.config.tables.run import FIRST_LOOK
from retrain.errors import ConfigError
from retrain.runtime.text import list_some, plural, shorten_path
from retrain.storage.logs import MANIFEST
from retrain.types import JsonObject

MORE_IS_BETTER = (
    "correct_rate",
    "running_correct_rate",
    "mean_reward",
    "eval_pass_at_1",
    "eval_pass_at_k",
    "eval_ci_low",
    "eval_ci_high",
    "student_accuracy",
    "improvement_rate",
    "tokens_per_s",
)
LESS_IS_BETTER = (
    "loss",
    "reward_errors",
    "eval_reward_errors",
    "rollout_errors",
    "max_token_hit_rate",
    "kl_sample_train",
    "skipped_steps",
    "groups_all_wrong",
    "degradation_rate",
)
"""With the times; of any other metric, such as a length or a norm, neither direction is better."""
NEVER_CORRECT = (
    "Every value is 0: no completion counted as correct, for which its reward must be at least [reward] correct_from, "
    "1.0 by default; penalties may keep it below that."
)
RATES = (*CORRECT_RATES, "max_token_hit_rate")
"""Metrics from 0 to 1, so that no difference exceeds 1."""
COLUMNS = ("condition", "seeds", "mean", "difference", "interval", "p", "p (Holm)", "d", "verdict")
NARROW = ("condition", "mean", "difference", "interval", "p (Holm)")
"""Columns on a narrow terminal; the sentence below the table has the verdict and the number of seeds."""


@dataclass(frozen=True)
class ComparisonReport:
    """Every condition compared with the baseline on one metric."""

    metric: str
    step: int
    higher_is_better: bool | None
    """None where neither direction is better."""
    alpha: float
    level: float
    """Level of each test and of the intervals: alpha, or lower if the campaign could stop early."""
    notes: list[str]
    noise_floor: NoiseFloor | None
    values: Mapping[str, Mapping[int, float]]
    """Values by condition and seed."""
    comparisons: list[Comparison]
    by_problem: dict[str, ProblemComparison]
    """The same pairs on the held-out problems, by condition, where every run stored them."""

    @property
    def noise(self) -> float | None:
        """The difference that two runs of one condition exceed in 5% of cases; None if the seeds do not tell."""
        floor = self.noise_floor
        if floor is None or not floor.standard_deviation or (self.metric in RATES and floor.single_runs == 1.0):
            return None
        return floor.single_runs

    def as_json(self) -> dict[str, object]:
        """What `retrain compare --json` prints."""
        table = asdict(self)
        problems = table.pop("by_problem")
        for row, comparison in zip(table["comparisons"], self.comparisons, strict=True):
            row |= {"sentence": comparison.sentence, "problems": problems.get(comparison.condition)}
        table["values"] = {name: {str(s): v for s, v in seeds.items()} for name, seeds in self.values.items()}
        return table


def compare_runs(
    runs: Sequence[RunRecord],
    metric: str | None = None,
    last: int = 10,
    higher_is_better: bool | None = None,
    baseline: str | None = None,
    alpha: float = 0.05,
) -> ComparisonReport:
    """Compare every condition with the baseline (by default the first), paired by seed.

    `higher_is_better` is by default what is known of the metric.
    """
    runs, empty = leave_out_empty(runs)
    switched = explain_metric(runs) if metric is None else []
    metric = metric or default_metric(runs)
    runs, unlike = leave_out_unlike(runs, metric, baseline)
    measured = measure(runs, metric, last)
    otherwise = find_unlike_runs(runs, measured.metric, baseline or next(iter(measured.values)))
    says_better = higher_is_better is not None
    if not says_better:
        higher_is_better = better_direction(measured.metric)
    campaigns = find_campaigns(runs)
    missing = _missing_baselines(campaigns, measured) if baseline is None else []
    campaigns = {folder: table for folder, table in campaigns.items() if _could_stop_early(table)}
    looks = _find_looks(campaigns, measured, baseline, alpha)
    comparisons = compare(measured.values, baseline, alpha, higher_is_better, looks)
    floor = noise_floor(measured.values)
    if measured.metric in RATES:
        comparisons = [_limit_to_rates(c) for c in comparisons]
        floor = replace(floor, single_runs=min(1.0, floor.single_runs)) if floor else None
    if not says_better:
        comparisons = [_without_direction(c) if c.condition in otherwise else c for c in comparisons]
    by_problem = {c.condition: _by_problem(runs, measured, c, alpha) for c in comparisons}
    return ComparisonReport(
        metric=measured.metric,
        step=measured.step,
        higher_is_better=higher_is_better,
        alpha=alpha,
        level=looks.level(alpha) if looks else alpha,
        notes=[
            *missing,
            *empty,
            *switched,
            *unlike,
            *measured.notes,
            *(
                f"{name} and the baseline are not measured alike: {other}. A difference may come from that"
                + ("." if says_better else ", so neither is called better.")
                for name, other in otherwise.items()
            ),
            *_edited_between_seeds(runs),
            *find_unlabelled(runs, baseline or next(iter(measured.values))),
            *_unpaired(measured, comparisons),
            *_describe_looks(campaigns, looks, alpha),
        ],
        noise_floor=floor,
        values=measured.values,
        comparisons=comparisons,
        by_problem={name: found for name, found in by_problem.items() if found is not None},
    )


def find_unlike_runs(runs: Sequence[RunRecord], metric: str, baseline: str) -> dict[str, str]:
    """The conditions of which a metric is not measured as that of the baseline, and why."""
    configs = {run.condition: run.config for run in runs}
    if baseline not in configs:
        return {}  # it is rejected as unknown
    firsts = {run.seed: run.inputs for run in runs if run.condition == baseline}
    edited: dict[str, list[str]] = {}
    for run in runs if metric in SCORED else ():
        edited.setdefault(run.condition, []).extend(edited_inputs(firsts.get(run.seed, {}), run.inputs))
    found = {
        name: f"{' and '.join(dict.fromkeys(inputs))} changed between their runs"
        for name, inputs in edited.items()
        if inputs
    }
    inputs = {run.condition: run.inputs for run in runs}
    for name, option in find_unlike(configs, baseline, metric, inputs).items():
        found[name] = f"{found[name]}, and {option}" if name in found else option
    return found


def _edited_between_seeds(runs: Sequence[RunRecord]) -> list[str]:
    """A note on inputs that changed between the seeds of a condition, whose mean is then over different ones."""
    firsts: dict[str, RunRecord] = {}
    found: dict[str, list[str]] = {}
    for run in runs:
        for name in edited_inputs(firsts.setdefault(run.condition, run).inputs, run.inputs):
            found.setdefault(name, []).append(run.path.name)
    return [
        f"{name[0].upper()}{name[1:]} changed between seeds: {list_some(paths)} had a different version than the first "
        "run of the condition. Differences are between runs of the same seed; means and the noise floor mix both."
        for name, paths in found.items()
    ]


def _without_direction(c: Comparison) -> Comparison:
    """The same comparison where more is not known to be better."""
    return c if c.verdict == "insufficient_evidence" else replace(c, verdict="significant_difference")


def better_direction(metric: str) -> bool | None:
    """Whether higher values of a metric are better; None where neither direction is."""
    if metric in MORE_IS_BETTER:
        return True
    return False if metric.endswith("_time_s") or metric.removeprefix("eval_") in LESS_IS_BETTER else None


def _limit_to_rates(c: Comparison) -> Comparison:
    """The same comparison without impossible values: t intervals of two or three seeds may reach beyond ±1."""
    test = replace(c.test, interval=_clip(c.test.interval), bootstrap_interval=_clip(c.test.bootstrap_interval))
    return replace(c, test=test, detectable=None if c.detectable is None else min(1.0, c.detectable))


def _clip(interval: Interval | None) -> Interval | None:
    return (max(-1.0, interval[0]), min(1.0, interval[1])) if interval else None


def find_campaigns(runs: Sequence[RunRecord]) -> dict[Path, JsonObject]:
    """The manifests of the campaigns that the runs belong to."""
    found = {}
    for folder in dict.fromkeys(run.path.resolve().parent.parent for run in runs):
        # Something else may have the same name.
        with suppress(ConfigError):
            if (folder / MANIFEST).is_file() and (table := read_manifest(folder))["runs"]:
                found[folder] = table
    return found


def _could_stop_early(table: JsonObject) -> bool:
    return bool(table.get("config", {}).get("campaign", {}).get("stop_when") or table.get("stop_when"))


def _missing_baselines(campaigns: Mapping[Path, JsonObject], measured: Measured) -> list[str]:
    """Notes on campaigns whose first condition has no run that could be compared."""
    firsts = {table["runs"][0]["condition"]: shorten_path(folder) for folder, table in campaigns.items()}
    used = next(iter(measured.values))
    return [
        f"No run of {name}, the first condition of {folder}, can be compared; the baseline is {used}."
        for name, folder in firsts.items()
        if not any(each == name or each.startswith(f"{name},") for each in measured.values)
    ]


def _find_looks(
    campaigns: Mapping[Path, JsonObject], measured: Measured, baseline: str | None, alpha: float
) -> Looks | None:
    """The sequential test of the campaigns. Its level is valid for any metric, its decisions only for their own."""
    if not campaigns:
        return None
    first = baseline or next(iter(measured.values))
    seeds, conditions = max(FIRST_LOOK, *map(len, measured.values.values())), len(measured.values)
    for table in campaigns.values():
        seeds = max(seeds, len({entry["seed"] for entry in table["runs"]}))
        conditions = max(conditions, len({entry["condition"] for entry in table["runs"]}))
    looks = Looks(seeds, conditions - 1)
    decided = {
        name
        for made in (table.get("stop_when") or {} for table in campaigns.values())
        for name, decision in made.get("decisions", {}).items()
        # With more conditions or seeds than it was made for, a decision may have been too easy.
        if (made.get("baseline"), made.get("metric")) == (first, measured.metric)
        and decision["level"] <= looks.level(alpha)
    }
    return replace(looks, decided=frozenset(decided))


def _describe_looks(campaigns: Mapping[Path, JsonObject], looks: Looks | None, alpha: float) -> list[str]:
    """Notes on campaigns that could stop early."""
    if looks is None:
        return []
    level = looks.level(alpha)
    names = ", ".join(min(str(folder), os.path.relpath(folder), key=len) for folder in campaigns)
    return [
        f"{names} could stop early after a sequential test of up to {looks.max_seeds} seeds. Each test and interval "
        f"has the level {level:.4g}, so that the tests of all seeds and conditions together have an error rate of "
        f"{alpha:g}. The size of a difference at which a condition stopped early is overestimated.",
        *(
            f"{name}: decided after {made['seeds']} seeds (p = {made['p_value']:.2g}), which later seeds do not undo."
            for table in campaigns.values()
            for name, made in (table.get("stop_when") or {}).get("decisions", {}).items()
            if name in looks.decided
        ),
    ]


def _unpaired(measured: Measured, comparisons: Sequence[Comparison]) -> list[str]:
    """Notes on seeds that only one side has."""
    notes = []
    for c in comparisons:
        alone = sorted(measured.values[c.condition].keys() ^ measured.values[c.baseline].keys())
        if alone:
            seeds, word = ", ".join(map(str, alone)), "seed" if len(alone) == 1 else "seeds"
            notes.append(f"{c.condition} and {c.baseline} do not share {word} {seeds}; ignored.")
    return notes


def _by_problem(
    runs: Sequence[RunRecord], measured: Measured, pair: Comparison, alpha: float
) -> ProblemComparison | None:
    """The pair on the held-out problems, where every run of it stored them."""
    if measured.metric != "eval_pass_at_1":
        return None
    both = [
        [run for seed in pair.seeds for run in runs if (run.condition, run.seed) == (name, seed)]
        for name in (pair.baseline, pair.condition)
    ]
    rates = problem_rates([*both[0], *both[1]], measured.step)
    if not rates or not rates[0]:
        return None
    found = compare_problems(np.array(rates[: len(both[0])]), np.array(rates[len(both[0]) :]), alpha)
    counted = [run.evaluations[measured.step]["counted"] for run in (*both[0], *both[1])]
    scored = {tuple(map(bool, counts)) for counts in counted}
    left_out = len(counted[0]) - found.problems
    return replace(found, left_out=left_out, are_same=len(scored) == 1, interval=_clip(found.interval))


def header(report: ComparisonReport) -> tuple[str, ...]:
    """The titles of the columns, with the level of the interval."""
    titles = {"interval": f"{100 * (1 - report.level):.4g}% interval"}
    if report.level < report.alpha:
        titles["p (Holm)"] = "p (adj.)"
    return tuple(titles.get(name, name) for name in COLUMNS)


def baseline_seeds(report: ComparisonReport) -> tuple[int, ...]:
    """The seeds of the baseline that any condition is compared with."""
    return tuple(sorted({seed for c in report.comparisons for seed in c.seeds}))


def baseline_mean(report: ComparisonReport) -> float:
    """The mean of the baseline over these seeds."""
    seeds, values = baseline_seeds(report), report.values[report.comparisons[0].baseline]
    return sum(values[seed] for seed in seeds) / len(seeds)


def mark_of(report: ComparisonReport, c: Comparison) -> str:
    """An asterisk if the difference is relative to a baseline mean other than the one in the table."""
    return "" if c.seeds == baseline_seeds(report) else "*"


def table_rows(report: ComparisonReport) -> list[tuple[str, ...]]:
    """The baseline and each comparison as cells."""
    first, count = report.comparisons[0].baseline, str(len(baseline_seeds(report)))
    rows: list[tuple[str, ...]] = [(first, count, f"{baseline_mean(report):.4f}", "", "", "", "", "", "baseline")]
    for c in report.comparisons:
        test = c.test
        rows.append(
            (
                c.condition,
                str(len(c.seeds)),
                f"{c.mean:.4f}",
                f"{test.difference:+.4f}{mark_of(report, c)}",
                f"{test.interval[0]:+.4f} to {test.interval[1]:+.4f}" if test.interval else "none",
                _p(test.p_value),
                _p(c.p_adjusted),
                f"{test.cohens_d:.2f}" if test.cohens_d is not None else "none",
                c.verdict.replace("_", " "),
            )
        )
    return rows


def _p(value: float | None) -> str:
    return "none" if value is None else "<0.0001" if value < 0.0001 else f"{value:.4f}"


def fit_table(report: ComparisonReport, width: int | None) -> list[tuple[str, ...]]:
    """The table with its header, with fewer columns if it is wider than `width`; None is unlimited."""
    rows = [header(report), *table_rows(report)]
    # The console's tables have two characters between columns and one at each end.
    needed = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    if width is None or needed <= width:
        return rows
    return [tuple(row[COLUMNS.index(name)] for name in NARROW) for row in rows]


def explanation_lines(report: ComparisonReport) -> list[str]:
    """What the table leaves out, one sentence per line."""
    lines = []
    for c in report.comparisons:
        lines.append(c.sentence)
        test, seeds, problems = c.test, len(c.seeds), report.by_problem.get(c.condition)
        if mark_of(report, c):
            lines.append(f"  * {c.baseline} has a mean of {c.baseline_mean:.4f} with these {plural(seeds, 'seed')}.")
        is_rate = report.metric in RATES
        if is_rate and test.interval and max(map(abs, test.interval)) == 1.0:
            lines.append(f"  The interval is cut at ±1, the largest possible difference: {seeds} seeds are too few.")
        if test.bootstrap_interval:
            low, high = test.bootstrap_interval
            lines.append(f"  Studentized bootstrap: {low:+.4f} to {high:+.4f}.")
        elif test.interval:
            lines.append(f"  Studentized bootstrap: none, {why_no_bootstrap(report.level)}.")
        if test.permutation_p is not None:
            least = f" ({seeds} seeds cannot give less than {_p(2 / 2**seeds)})" if seeds <= 6 else ""
            lines.append(f"  Sign-flip p = {_p(test.permutation_p)}{least}.")
        if c.detectable is not None and not (is_rate and c.detectable == 1.0):
            lines.append(f"  Detectable difference at 80% power: {c.detectable:.4f}.")
        if problems and problems.interval:
            low, high = problems.interval
            which = f"the {problems.problems} held-out problems"
            if problems.left_out:
                total = problems.problems + problems.left_out
                which = f"the {problems.problems} of {total} held-out problems that every run scored"
            if not problems.are_same:
                lines.append("  The means are over the problems that each run scored, which are not the same.")
            lines.append(
                f"  On {which} the difference is {problems.difference:+.4f} "
                f"({low:+.4f} to {high:+.4f}): {problems.better} better, {problems.worse} worse."
            )
    if report.metric in CORRECT_RATES and not any(any(seeds.values()) for seeds in report.values.values()):
        lines.append(NEVER_CORRECT)
    floor = report.noise_floor
    if floor:
        reach = "there are too few seeds to say how much two runs of one condition may differ."
        if report.noise is not None:
            reach = f"in 5% of cases, two runs of one condition differ by more than {report.noise:.4f}."
        spread = f"the standard deviation between seeds is {floor.standard_deviation:.4f}; {reach}"
        if floor.standard_deviation == 0.0:
            spread = "unknown, since all seeds of a condition gave the same value."
        lines.append(f"Noise floor: {spread}")
    return [*lines, *(f"Note: {note}" for note in report.notes)]


def markdown_lines(report: ComparisonReport) -> list[str]:
    """The table and the explanation in Markdown."""
    titles = f"| {' | '.join(header(report))} |"
    head = [f"`{report.metric}` at step {report.step}", "", titles, "|---" * len(COLUMNS) + "|"]
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in table_rows(report)]
    return [*head, *body, "", *(f"- {line.strip()}" for line in explanation_lines(report))]
