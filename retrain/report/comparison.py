"""The report's table of verdicts: conditions against the first one, paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from retrain.errors import ConfigError
from retrain.report.folders import RunRecord
from retrain.stats import Comparison, compare

Data = dict[str, Any]
# Steps at the end of a run that stand for how it came out, where nothing was held out.
LATE = 0.1


def compare_runs(runs: Sequence[RunRecord]) -> tuple[Data | None, str]:
    """The table, or a sentence that says why there is none."""
    held_out = all(run.evals for run in runs)
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        number = run.evals[-1]["eval_pass_at_1"] if held_out else late_correct_rate(run)
        if number is not None:
            values.setdefault(run.condition, {})[run.seed] = number
    try:
        rows = compare(values)
    except ConfigError as error:
        return None, f"No comparison: {error}"
    metric = "Held-out pass@1 at the end" if held_out else "Correct rate of the last tenth of training"
    return {"metric": metric, "baseline": rows[0].baseline, "rows": [_row(row) for row in rows]}, ""


def late_correct_rate(run: RunRecord) -> float | None:
    """Mean correct rate over the last tenth of a run's steps."""
    rates = [row["correct_rate"] for row in run.metrics if row.get("correct_rate") is not None]
    return statistics.fmean(rates[-max(1, int(LATE * len(rates))) :]) if rates else None


def _row(row: Comparison) -> Data:
    low, high = row.test.interval or (None, None)
    return {
        "condition": row.condition,
        "seeds": len(row.seeds),
        "mean": row.mean,
        "baseline_mean": row.baseline_mean,
        "difference": row.test.difference,
        "low": low,
        "high": high,
        "p_value": row.test.p_value,
        "p_adjusted": row.p_adjusted,
        "effect": row.test.cohens_d,
        "code": row.verdict,
        "sentence": row.sentence,
    }
