"""Conditions compared seed by seed: the numbers, and the lines that say what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from retrain.analysis.runs import (
    MANIFEST,
    Measured,
    RunRecord,
    default_metric,
    measure,
    problem_rates,
    read_manifest,
)
from retrain.analysis.stats import (
    Comparison,
    NoiseFloor,
    ProblemComparison,
    compare,
    compare_problems,
    noise_floor,
)

# Less of these is better; more of anything else.
LESS_IS_BETTER = ("loss", "reward_errors", "max_token_hit_rate", "kl_sample_train", "skipped_steps", "groups_all_wrong")
COLUMNS = ("condition", "seeds", "mean", "difference", "95 % interval", "p", "p (Holm)", "d", "verdict")


def compare_runs(
    runs: Sequence[RunRecord],
    metric: str | None = None,
    last: int = 10,
    lower_is_better: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """All that `retrain compare` knows, as the JSON shows it; options are those of `retrain.analysis.stats.compare`."""

    measured = measure(runs, metric or default_metric(runs), last)
    less = lower_is_better or measured.metric.endswith("_time_s") or measured.metric in LESS_IS_BETTER
    comparisons = compare(measured.values, higher_is_better=not less, **options)
    return {
        "metric": measured.metric,
        "step": measured.step,
        "higher_is_better": not less,
        "alpha": options.get("alpha", 0.05),
        "notes": [*measured.notes, *_unpaired(measured, comparisons)],
        "noise_floor": _table(noise_floor(measured.values)),
        "values": {name: {str(s): v for s, v in seeds.items()} for name, seeds in measured.values.items()},
        "comparisons": [
            asdict(c) | {"sentence": c.sentence, "problems": _table(_by_problem(runs, measured, c))}
            for c in comparisons
        ],
    }


def early_stops(folders: Sequence[str]) -> list[str]:
    """Campaigns that looked at their results while they ran say so."""

    notes = []
    for folder in map(Path, folders):
        campaign = read_manifest(folder).get("config", {}).get("campaign", {}) if (folder / MANIFEST).is_file() else {}
        if campaign.get("stop_when"):
            notes.append(
                f"{folder} was allowed to stop once a sequential test had decided. That test keeps its error rate; the "
                "numbers here are of the seeds it ended with, and differences look larger than they are."
            )
    return notes


def _table(record: NoiseFloor | ProblemComparison | None) -> dict[str, Any] | None:
    return asdict(record) if record is not None else None


def _unpaired(measured: Measured, comparisons: Sequence[Comparison]) -> list[str]:
    """Seeds that have no partner."""
    notes = []
    for c in comparisons:
        alone = sorted(measured.values[c.condition].keys() ^ measured.values[c.baseline].keys())
        if alone:
            seeds = ", ".join(map(str, alone))
            notes.append(f"{c.condition} and {c.baseline} do not share seeds {seeds}, which were left out.")
    return notes


def _by_problem(runs: Sequence[RunRecord], measured: Measured, pair: Comparison) -> ProblemComparison | None:
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
    return compare_problems(np.array(rates[: len(both[0])]), np.array(rates[len(both[0]) :]))


def table_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """The baseline and each comparison as cells."""
    comparisons = data["comparisons"]
    first = comparisons[0]["baseline"]
    values = list(data["values"][first].values())
    rows: list[tuple[str, ...]] = [
        (first, str(len(values)), f"{sum(values) / len(values):.4f}", "", "", "", "", "", "baseline")
    ]
    for c in comparisons:
        test = c["test"]
        interval = test["interval"]
        rows.append(
            (
                c["condition"],
                str(len(c["seeds"])),
                f"{c['mean']:.4f}",
                f"{test['difference']:+.4f}",
                f"{interval[0]:+.4f} to {interval[1]:+.4f}" if interval else "none",
                _p(test["p_value"]),
                _p(c["p_adjusted"]),
                f"{test['cohens_d']:.2f}" if test["cohens_d"] is not None else "none",
                c["verdict"],
            )
        )
    return rows


def _p(value: float | None) -> str:
    return "none" if value is None else "<0.0001" if value < 0.0001 else f"{value:.4f}"


def explanation_lines(data: dict[str, Any]) -> list[str]:
    """What the table leaves out, a sentence a line."""
    lines = []
    for c in data["comparisons"]:
        lines.append(c["sentence"])
        test, seeds, problems = c["test"], len(c["seeds"]), c["problems"]
        if test["bootstrap_interval"]:
            low, high = test["bootstrap_interval"]
            lines.append(f"  Studentised bootstrap: {low:+.4f} to {high:+.4f}.")
        elif test["interval"]:
            lines.append("  Studentised bootstrap: none, too few of the differences are distinct.")
        if test["permutation_p"] is not None:
            least = f" ({seeds} seeds cannot give less than {_p(2 / 2**seeds)})" if seeds <= 6 else ""
            lines.append(f"  Sign-flip p = {_p(test['permutation_p'])}{least}.")
        if c["detectable"] is not None:
            lines.append(f"  A difference of {c['detectable']:.4f} would be found in 80 % of cases.")
        if problems and problems["interval"]:
            low, high = problems["interval"]
            lines.append(
                f"  On the {problems['problems']} held-out problems these runs differ by {problems['difference']:+.4f} "
                f"({low:+.4f} to {high:+.4f}): {problems['better']} problems better, {problems['worse']} worse."
            )
    floor = data["noise_floor"]
    if floor:
        lines.append(
            f"Noise floor: seeds of one condition spread by {floor['standard_deviation']:.4f}; two single runs of "
            f"it are more than {floor['single_runs']:.4f} apart in one case of twenty."
        )
    return [*lines, *(f"Note: {note}" for note in data["notes"])]


def markdown_lines(data: dict[str, Any]) -> list[str]:
    """The same for a page."""
    head = [f"`{data['metric']}` at step {data['step']}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in table_rows(data)]
    return [*head, *body, "", *(f"- {line.strip()}" for line in explanation_lines(data))]
