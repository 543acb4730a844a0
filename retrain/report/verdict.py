"""What the runs show, in one sentence and one plot: conditions against the baseline, or each run before and after."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from retrain.analysis.change import (
    Change,
    Row,
    comparable,
    find_other_setup,
    noise_between,
    paired_change,
    scored,
    t_quantile,
)
from retrain.analysis.measure import require_same_model
from retrain.analysis.runs import RunRecord, describe_records
from retrain.errors import ConfigError
from retrain.report.runlog import RunLog
from retrain.runtime.text import plural
from retrain.storage.checkpoint import read_state
from retrain.types import JsonObject

WINDOW = 10
"""Steps at the beginning and the end of a run without evaluations."""
_NAMES = {"eval_pass_at_1": "held-out pass@1", "correct_rate": "the correct rate in training"}

_WORDS = {
    "statistically_significant_improvement": "better than",
    "significant_degradation": "worse than",
    "significant_difference": "different from",
}


def describe_verdict(runs: Sequence[RunRecord], logs: Sequence[RunLog]) -> JsonObject:
    """The comparison of conditions if there is one, else every run before and after."""
    note = ""
    if len({run.condition for run in runs}) > 1:
        try:
            if not all(run.is_evaluated for run in runs):
                runs = [replace(run, metrics=log.rates()) for run, log in zip(runs, logs, strict=True)]
            return compare_conditions(runs)
        except ConfigError as error:
            note = f"The conditions are not compared: {error}"
    notes = [*([note] if note else ()), *describe_records(runs)]
    for run in runs:
        notes += [f"{run.path.name}: --force-resume: {line}." for line in read_state(run.path).get("forced", ())]
    return before_and_after(runs, logs) | {"notes": notes}


def compare_conditions(runs: Sequence[RunRecord]) -> JsonObject:
    """The verdict of `retrain compare`, with the difference of every pair of seeds."""
    # scipy takes a second and 60 MB, which a single run does not need.
    from retrain.analysis.comparison import (  # noqa: PLC0415
        COLUMNS,
        baseline_mean,
        baseline_seeds,
        compare_runs,
        explanation_lines,
        header,
        mark_of,
    )

    require_same_model(runs)
    report = compare_runs(runs)
    titles = dict(zip(COLUMNS, header(report), strict=True))
    rows = []
    for c in report.comparisons:
        mine, other = report.values[c.condition], report.values[c.baseline]
        rows.append(
            {
                "condition": c.condition,
                "mean": c.mean,
                "p_adjusted": c.p_adjusted,
                "mark": mark_of(report, c),
                "verdict": c.verdict,
                "sentence": c.sentence,
                "caution": c.caution if c.verdict != "insufficient_evidence" else "",
                "confidence": c.confidence,
                "pairs": [{"seed": seed, "difference": mine[seed] - other[seed]} for seed in c.seeds],
                **asdict(c.test),
            }
        )
    baseline = report.comparisons[0].baseline
    return {
        "kind": "comparison",
        "sentence": _headline(rows, baseline, _NAMES.get(report.metric, report.metric)),
        "metric": report.metric,
        "name": _NAMES.get(report.metric, report.metric),
        "step": report.step,
        "baseline": baseline,
        "baseline_mean": baseline_mean(report),
        "baseline_seeds": len(baseline_seeds(report)),
        "interval_title": titles["interval"],
        "p_title": titles["p (Holm)"],
        "higher_is_better": report.higher_is_better,
        "noise": report.noise,
        "rows": rows,
        "notes": _name_conditions(explanation_lines(report), rows),
    }


def _name_conditions(lines: Sequence[str], rows: Sequence[JsonObject]) -> list[str]:
    """The lines without the sentences of the rows; indented ones belong to the sentence above, and say to which of
    several conditions."""
    conditions, owner, notes = {row["sentence"]: row["condition"] for row in rows}, "", []
    for line in lines:
        if line in conditions:
            owner = f"{conditions[line]}: " if len(rows) > 1 else ""
        else:
            notes.append(f"{owner if line.startswith(' ') else ''}{line.strip()}")
    return notes


def _headline(rows: Sequence[JsonObject], baseline: str, metric: str) -> str:
    if len(rows) == 1:
        return _pair_sentence(rows[0], baseline, metric)
    parts = []
    for verdict, words in _WORDS.items():
        names = [row["condition"] for row in rows if row["verdict"] == verdict]
        if names:
            parts.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {words} {baseline}")
    rest = sum(row["verdict"] == "insufficient_evidence" for row in rows)
    if not parts:
        return f"None of the {len(rows)} conditions can be distinguished from {baseline} on {metric}."
    tail = f"; {plural(rest, 'other condition')} cannot be distinguished from it" if rest else ""
    caution = next((row["caution"] for row in rows if row["caution"]), "")
    return f"On {metric}, {'; '.join(parts)}{tail}.{caution}"


def _pair_sentence(row: JsonObject, baseline: str, metric: str) -> str:
    """The sentence of `retrain compare` for one pair; a significant one in points, which read easier."""
    if row["verdict"] == "insufficient_evidence" or not row["interval"]:
        return str(row["sentence"])
    low, high = row["interval"]
    return (
        f"{row['condition']} is {_WORDS[row['verdict']]} {baseline}: {100 * row['difference']:+.1f} points of {metric} "
        f"({100 * row['confidence']:.4g}% interval {100 * low:+.1f} to {100 * high:+.1f}, "
        f"{plural(len(row['pairs']), 'seed')}).{row['caution']}"
    )


def before_and_after(runs: Sequence[RunRecord], logs: Sequence[RunLog]) -> JsonObject:
    """Every run at its beginning and its end: held-out, or in training where there are not two evaluations."""
    held_out = all(len(scored(run.evaluations.values())) > 1 for run in runs) and bool(runs)
    has_rates = any("correct_rate" in log.columns.values for log in logs)
    metric = "eval_pass_at_1" if held_out else "correct_rate" if has_rates else "mean_reward"
    rows = []
    for run, log in zip(runs, logs, strict=True):
        pair = _evaluations(run) if held_out else _training(log, metric)
        if pair:
            ids = {"run": log.id, "name": run.path.resolve().name, "condition": run.condition, "seed": run.seed}
            ends = scored(run.evaluations.values()) if held_out else []
            change = paired_change(ends[0], ends[-1]) if held_out else None
            rows.append(ids | {"before": pair[0], "after": pair[1], "change": asdict(change) if change else None})
    kind = "evaluation" if held_out else "training"
    result = {"kind": kind, "metric": metric, "name": _NAMES.get(metric, "mean reward in training"), "rows": rows}
    if not rows:
        return result | {"kind": "waiting", "sentence": "Waiting for the first step."}
    return result | {
        "sentence": _change(rows, kind, metric)
        + (_unlike(runs) if held_out else _edited(logs) + _unscored(logs, metric))
        + _left_out(runs)
    }


def _unlike(runs: Sequence[RunRecord]) -> str:
    """A sentence if the evaluations of several runs, whose means are shown, cannot be compared."""
    last = [scored(run.evaluations.values())[-1] for run in runs]
    reasons = {"problems": "on different problems", "sampling": "with different sampling options"}
    reasons |= {"code": "by different versions of a reward"}
    differing = {key for row in last for key in find_other_setup(last[0], row)}
    found = [text for key, text in reasons.items() if key in differing]
    return f" The runs were evaluated {' and '.join(found)}, so these rates do not compare." if found else ""


def _edited(logs: Sequence[RunLog]) -> str:
    """A sentence if data, code or options of runs were changed while they were trained."""
    at = [log.edited_at for log in logs if log.edited_at]
    what = "data, code or options of the run were changed there"
    if len(logs) == 1 and at:
        return f" Steps before {at[0]} are left out: {what}."
    return f" In {plural(len(at), 'run')}, steps before a change of data, code or options are left out." if at else ""


def _unscored(logs: Sequence[RunLog], metric: str) -> str:
    """A sentence if steps without a score are left out."""
    values = [log.columns.column(metric)[np.array(log.columns.steps) >= log.edited_at] for log in logs]
    count, total = sum(int(np.isnan(each).sum()) for each in values), sum(map(len, values))
    if not 0 < count < total:
        return ""
    rest = "has no score and is left out" if count == 1 else "have no score and are left out"
    return f" {count} of {plural(total, 'step')} {rest}."


def _left_out(runs: Sequence[RunRecord]) -> str:
    count = sum(len(run.evaluations) - len(comparable(list(run.evaluations.values()))) for run in runs)
    verb = "is" if count == 1 else "are"
    what = "with other problems, sampling options or reward code"
    return f" {plural(count, 'earlier evaluation')} {what} {verb} left out." if count else ""


def _evaluations(run: RunRecord) -> tuple[JsonObject, JsonObject]:
    first, *_, last = scored(run.evaluations.values())
    return _point(first), _point(last)


def _point(row: Row) -> JsonObject:
    rate = row["eval_pass_at_1"]
    low, high = row.get("eval_ci_low", rate), row.get("eval_ci_high", rate)
    return {"step": row["step"], "y": rate, "low": low, "high": high, "problems": len(row.get("counted") or ())}


def _training(log: RunLog, metric: str) -> tuple[JsonObject, JsonObject] | None:
    """Means over the first and the last steps."""
    values, steps = log.columns.column(metric).astype(np.float64), np.array(log.columns.steps)
    is_known = ~np.isnan(values) & (steps >= log.edited_at)
    values, steps = values[is_known], steps[is_known]
    if not len(values):
        return None
    count = min(WINDOW, max(1, len(values) // 2))
    ends = (slice(0, count), slice(len(values) - count, None))
    first, last = ({"step": int(steps[end][-1]), "y": float(values[end].mean()), "count": count} for end in ends)
    noise = noise_between(*(values[end].tolist() for end in ends)) if count > 1 else math.inf
    return first, {**last, "may_be_noise": abs(last["y"] - first["y"]) <= noise}


def _change(rows: Sequence[JsonObject], kind: str, metric: str) -> str:
    names = list(dict.fromkeys(row["condition"] for row in rows))
    if len(names) > 1:
        return _changes(rows, names, metric)
    before, after = _means(rows)
    show = _format_for(metric)
    if len(rows) == 1 and rows[0]["change"] is not None:
        return _paired_sentence(rows[0])
    may_be_noise = after != before and _may_be_noise(rows)
    verb = "stayed" if after == before else "went" if may_be_noise else "rose" if after > before else "fell"
    change = f"{verb} at {show(after)}" if verb == "stayed" else f"{verb} from {show(before)} to {show(after)}"
    first, last, name = rows[0]["before"], rows[0]["after"], "Held-out pass@1"
    if kind == "evaluation":
        low, high = last["low"], last["high"]
        problems = f", {plural(last['problems'], 'problem')}" if last["problems"] else ""
        where = f" (95% interval {_percent(low)} to {_percent(high)}{problems}){_span(rows[0])}"
        if len(rows) == 1 and first["low"] <= after <= first["high"] and verb != "stayed":
            where += ", which is within the interval of the first evaluation"
    else:
        name = "The mean reward in training" if metric == "mean_reward" else "The correct rate in training"
        where = _span(rows[0])
    if len(rows) > 1:
        ends, spans = [row["after"]["y"] for row in rows], {_span(row) for row in rows}
        where = spans.pop() if len(spans) == 1 else ""
        where += f" on average over {plural(len(rows), 'run')} (final values {show(min(ends))} to {show(max(ends))})"
    return f"{name} {change}{where}{', which may be noise' if may_be_noise else ''}."


def _may_be_noise(rows: Sequence[JsonObject]) -> bool:
    """Whether the change of a run is within its noise, or the mean change of several within that between them."""
    if len(rows) == 1:
        return bool(rows[0]["after"].get("may_be_noise", False))
    changes = [row["after"]["y"] - row["before"]["y"] for row in rows]
    half = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
    return bool(abs(statistics.fmean(changes)) <= half)


def _span(row: JsonObject) -> str:
    """Between which steps the change is: of two evaluations, or the first and the last of a training run."""
    count = row["after"].get("count")
    if count is None:
        return f" between steps {row['before']['step']} and {row['after']['step']}"
    if count > 1:
        return f" between the first {count} and the last {count} steps"
    return " between the first and last step"


def _paired_sentence(row: JsonObject) -> str:
    """One run between two evaluations, on the problems that both scored."""
    change = Change(**row["change"])
    verb = "went" if change.is_noise else "rose" if change.difference > 0 else "fell"
    moved = f"{verb} from {_percent(change.before)} to" if change.difference else "stayed at"
    noise = ", which may be noise" if change.is_noise and change.difference else ""
    steps = f"between steps {row['before']['step']} and {row['after']['step']}"
    interval = f"95% interval {100 * change.low:+.1f} to {100 * change.high:+.1f}"
    total = row["after"]["problems"]
    problems = plural(change.problems, "problem")
    if change.problems < total:
        # So these rates are not those that each evaluation reports.
        problems = f"only the {change.problems} of {plural(total, 'problem')} with a score in both evaluations"
    return (
        f"Held-out pass@1 {moved} {_percent(change.after)} {steps}{noise}: {100 * change.difference:+.1f} points "
        f"({interval}, {problems})."
    )


def _changes(rows: Sequence[JsonObject], names: Sequence[str], metric: str) -> str:
    """Conditions that are not compared, each before and after."""
    show, parts = _format_for(metric), []
    for name in names[:4]:
        before, after = _means([row for row in rows if row["condition"] == name])
        parts.append(f"{name} {show(before)} → {show(after)}")
    more = f" and {plural(len(names) - 4, 'other condition')}" if len(names) > 4 else ""
    title = _NAMES.get(metric, "the mean reward in training")
    ends = sorted({row["after"]["step"] for row in rows})
    when = f" The runs are at different steps ({ends[0]} to {ends[-1]})." if len(ends) > 1 else ""
    return f"{title[0].upper()}{title[1:]}: {', '.join(parts)}{more}.{when}"


def _means(rows: Sequence[JsonObject]) -> tuple[float, float]:
    return statistics.fmean(row["before"]["y"] for row in rows), statistics.fmean(row["after"]["y"] for row in rows)


def _format_for(metric: str) -> Callable[[float], str]:
    return "{:.3g}".format if metric == "mean_reward" else _percent


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
