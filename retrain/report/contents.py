"""The data of the report, read from run folders: curves, evaluations, statistics, settings and completions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from retrain.analysis.comparison import compare_runs, early_stops, explanation_lines
from retrain.analysis.runs import MANIFEST, Row, RunRecord, find_runs, read_manifest, require_same_model
from retrain.campaign.progress import read_progress
from retrain.config.options import options_by_path, paths_where, values_of
from retrain.config.toml import show_value
from retrain.errors import ConfigError
from retrain.runtime.text import plural
from retrain.storage.logs import FILES, GENERATIONS, parse_rows
from retrain.storage.recording import FOLDER as RECORDINGS
from retrain.types import JsonObject

Data = JsonObject

# Metrics with a curve.
SERIES = (
    "correct_rate", "running_correct_rate", "mean_reward", "loss", "grad_norm", "max_token_hit_rate", "ratio_mean",
    "kl_sample_train", "exec_entropy_mean", "exec_entropy_var", "plan_entropy_mean", "plan_entropy_var",
    "sepa_lambda", "sample_time_s", "score_time_s", "train_time_s", "tokens_per_s", "batch_size", "groups_all_right",
    "groups_all_wrong",
)  # fmt: skip
# Limits that keep the page responsive.
MAX_COMPLETIONS = 4000
MAX_CHARACTERS = 8_000_000


def collect(folders: Sequence[Path], live: float = 0.0) -> Data:
    """The data of the report. `live` is the polling interval of the page in seconds; 0 is a static page."""
    runs = find_runs(folders, tell_apart=True)
    groups, note = collect_groups(runs)
    columns, differences = differing_options(runs)
    conditions = len({run.condition for run in runs})
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "title": f"retrain: {', '.join(folder.resolve().name for folder in folders)}",
        "subtitle": f"{plural(len(runs), 'run')}, {plural(conditions, 'condition')}. Created {created}.",
        "version": sum(
            (run.path / name).stat().st_size for run in runs for name in FILES if (run.path / name).is_file()
        ),
        "live": live,
        "runs": [describe_run(run) for run in runs],
        **describe_comparison(runs, folders),
        "squeeze": find_squeeze(folders),
        "configs": differences,
        "config_columns": columns,
        "settings": shared_settings(runs),
        "origin": describe_origin(folders),
        "groups": groups,
        "groups_note": note,
    }


def describe_run(run: RunRecord) -> Data:
    """The curves and totals of one run."""
    rows = list(run.metrics.values())
    series = {key: [row.get(key) for row in rows] for key in SERIES}
    series["other_time_s"] = [_other_time(row) for row in rows]
    late = [row["correct_rate"] for row in rows[-max(1, len(rows) // 10) :] if row.get("correct_rate") is not None]
    evals = [
        {"x": row["step"], "y": row["eval_pass_at_1"], "low": row["eval_ci_low"], "high": row["eval_ci_high"], "n": 1}
        for row in run.evaluations.values()
    ]
    times = [row["step_time_s"] for row in rows if row.get("step_time_s")]
    progress = read_progress(run.path)
    return {
        "name": run.path.resolve().name,
        "condition": run.condition,
        "seed": run.seed,
        "status": run.status if run.status not in ("", "running") else progress.status,
        "done": rows[-1]["step"] + 1 if rows else 0,
        "max_steps": progress.max_steps,
        "late_correct_rate": statistics.fmean(late) if late else None,
        "last_eval": evals[-1] if evals else None,
        "median_step_s": statistics.median(times) if times else None,
        "steps": [row["step"] for row in rows],
        "series": series,
        "evals": evals,
        "totals": {
            "groups": sum(row.get("batch_size") or 0 for row in rows),
            "all_right": sum(row.get("groups_all_right") or 0 for row in rows),
            "all_wrong": sum(row.get("groups_all_wrong") or 0 for row in rows),
            "errors": sum(row.get("reward_errors") or 0 for row in rows),
        },
    }


def describe_comparison(runs: Sequence[RunRecord], folders: Sequence[Path]) -> Data:
    """The table of comparisons, or a sentence on why there is none."""
    try:
        require_same_model(runs)
        report = compare_runs(runs)
    except ConfigError as error:
        return {"compare": None, "compare_note": f"No comparison: {error}"}
    rows = [
        {
            "condition": c.condition,
            "mean": c.mean,
            "baseline_mean": c.baseline_mean,
            "p_adjusted": c.p_adjusted,
            "verdict": c.verdict,
            "sentence": c.sentence,
            "seeds": len(c.seeds),
            **asdict(c.test),
        }
        for c in report.comparisons
    ]
    report.notes.extend(early_stops([str(folder) for folder in folders]))
    sentences = {c.sentence for c in report.comparisons}
    notes = [line.strip() for line in explanation_lines(report) if line not in sentences]
    metric, baseline = f"{report.metric} at step {report.step}", report.comparisons[0].baseline
    return {"compare": {"metric": metric, "baseline": baseline, "rows": rows, "notes": notes}, "compare_note": ""}


def _other_time(row: Row) -> float | None:
    total = row.get("step_time_s")
    if total is None:
        return None
    parts = (row.get(key) or 0.0 for key in ("sample_time_s", "score_time_s", "train_time_s"))
    return max(0.0, float(total) - sum(parts))


def differing_options(runs: Sequence[RunRecord]) -> tuple[list[str], list[Data]]:
    """Options that differ between conditions, one column per condition, taken from its first run."""
    columns = list(dict.fromkeys(run.condition for run in runs))
    configs = {run.condition: values_of(run.config) for run in reversed(runs)}
    rows = []
    for path in values_of(runs[0].config):
        values = [configs[name].get(path) for name in columns]
        if path not in paths_where("identity") and any(value != values[0] for value in values):
            rows.append({"option": path, "values": [show_value(value) for value in values]})
    return columns, rows


def shared_settings(runs: Sequence[RunRecord]) -> list[Data]:
    """Options that all runs set to the same non-default value."""
    options, every = options_by_path(), [values_of(run.config) for run in runs]
    return [
        {"option": path, "value": show_value(value)}
        for path, value in every[0].items()
        if path in options
        and path not in {*paths_where("identity"), "plugins.search_paths"}
        and value != options[path].default
        and all(values.get(path) == value for values in every)
    ]


def describe_origin(folders: Iterable[Path]) -> list[str]:
    """Host, time and versions of each campaign, in sentences."""
    sentences = []
    for folder in folders:
        table = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
        if not table:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in (table.get("versions") or {}).items())
        git = table.get("git") or {}
        state = f"git {str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}" if git else "no git"
        sentences.append(
            f"{folder.resolve().name}: {table.get('status')}, started {table.get('started')}, ended "
            f"{table.get('ended') or 'not yet'}, on {table.get('host')}; {versions}; {state}."
        )
    return sentences


def find_squeeze(folders: Iterable[Path]) -> Data | None:
    """The LoRA rank analysis of a campaign, if any."""
    for folder in folders:
        squeeze = read_manifest(folder).get("squeeze") if (folder / MANIFEST).is_file() else None
        if squeeze and squeeze.get("ranks"):
            return {"recommended_rank": squeeze["recommended_rank"], "ranks": squeeze["ranks"]}
    return None


def collect_groups(runs: Sequence[RunRecord]) -> tuple[list[Data], str]:
    """Completions by group, up to the limits of a page: complete steps, evenly spaced over each run."""
    share = max(1, MAX_COMPLETIONS // len(runs))
    groups: list[Data] = []
    held = total = 0
    for index, run in enumerate(runs):
        wanted, count = _steps_that_fit(run, share)
        total += count
        found = list(_groups_of(index, run, wanted))
        held += sum(len(group["members"]) for group in found)
        groups += found
    return groups, f"{held} of {total} completions: complete steps, evenly spaced over each run."


def _steps_that_fit(run: RunRecord, most: int) -> tuple[set[int], int]:
    """Evenly spaced steps within the limits of completions and characters, always with the last one."""
    sizes: Counter[int] = Counter()
    characters = 0
    for row in read_lines(run.path / GENERATIONS):
        sizes[row["step"]] += 1
        characters += len(row["completion"])
    steps, total = sorted(sizes), sum(sizes.values())
    if not steps:
        return set(), 0
    room = min(most, int(total * MAX_CHARACTERS * most / MAX_COMPLETIONS / max(1, characters)))
    fitting = max(1, min(len(steps), room * len(steps) // max(1, total)))
    gap = max(1, fitting - 1)
    return {steps[round(at * (len(steps) - 1) / gap)] for at in range(fitting)} | {steps[-1]}, total


def _groups_of(index: int, run: RunRecord, steps: set[int]) -> Iterator[Data]:
    """The groups of the given steps; completions of one prompt are adjacent in the log."""
    group: Data | None = None
    recorded = _recorded(run, steps)
    place = Counter[int]()
    for row in read_lines(run.path / GENERATIONS):
        step = row["step"]
        if step not in steps:
            continue
        full = group is not None and len(group["members"]) >= run.config.training.group_size
        if group is None or full or (group["step"], group["prompt"]) != (step, row["prompt"]):
            if group is not None:
                yield group
            group = {"run": index, "step": step, "prompt": row["prompt"], "members": []}
            place[step] += 1
        member = {key: row.get(key) for key in ("reward", "outcome", "num_tokens")} | {"text": row["completion"]}
        numbers = recorded.get(step, [])
        at, number = place[step] - 1, len(group["members"])
        if at < len(numbers) and number < len(numbers[at]) and len(numbers[at][number]["text"]) == row["num_tokens"]:
            member["tokens"] = numbers[at][number]
        group["members"].append(member)
    if group is not None:
        yield group


def _recorded(run: RunRecord, steps: set[int]) -> dict[int, list[list[Data]]]:
    """Token data of the last three recorded steps."""
    available = {int(path.stem[5:]) for path in (run.path / RECORDINGS).glob("step_*.npz")}
    wanted = sorted(available & steps)[-3:]
    if not wanted:
        return {}
    from retrain.report.tokens import token_data  # noqa: PLC0415  (loads the tokenizer's libraries)

    return dict(token_data(run.path, run.config, wanted))


def read_lines(path: Path) -> Iterator[Data]:
    """The complete rows of a JSONL file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from parse_rows(lines)
