"""What the page shows, read from run folders: curves, evaluations, statistics, settings and completions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.analysis.comparison import compare_runs, early_stops, explanation_lines
from retrain.analysis.runs import MANIFEST, RunRecord, find_runs, read_manifest, require_same_model
from retrain.campaign.progress import read_progress
from retrain.config.options import options_by_path
from retrain.config.rules import values_of
from retrain.config.toml import show_value
from retrain.errors import ConfigError
from retrain.storage.logs import FILES, GENERATIONS, whole_rows
from retrain.storage.recording import FOLDER as RECORDINGS

Data = dict[str, Any]

# What is drawn; anything else a run logs stays in its metrics.jsonl.
SERIES = (
    "correct_rate", "running_correct_rate", "mean_reward", "loss", "grad_norm", "max_token_hit_rate", "ratio_mean",
    "kl_sample_train", "exec_entropy_mean", "exec_entropy_var", "plan_entropy_mean", "plan_entropy_var",
    "sepa_lambda", "sample_time_s", "score_time_s", "train_time_s", "tokens_per_s", "batch_size", "groups_all_right",
    "groups_all_wrong",
)  # fmt: skip
# Completions that a page holds at most, and characters of text in them; a browser stays quick with that many.
MOST_COMPLETIONS = 4000
MOST_CHARACTERS = 8_000_000
# Options that tell runs of one campaign apart without being a difference in method.
PLACES = ("training.seed", "logging.log_dir", "backend.adapter_path", "resume.from_", "logging.wandb_run_name",
          "logging.wandb_group", "logging.wandb_tags")  # fmt: skip


def collect(folders: Sequence[Path], live: float = 0.0) -> Data:
    """Everything one page shows of runs and campaigns. `live` is how often the page should ask again, in seconds."""
    runs = find_runs(folders, tell_apart=True)
    groups, note = collect_groups(runs)
    columns, differences = differing_options(runs)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "title": f"retrain: {', '.join(folder.resolve().name for folder in folders)}",
        "subtitle": f"{len(runs)} runs, {len({run.condition for run in runs})} conditions. Made {made}.",
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
    """One run's curves and totals."""
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
    """The table of verdicts, or a sentence that says why there is none."""
    try:
        require_same_model(runs)
        told = compare_runs(runs)
    except ConfigError as error:
        return {"compare": None, "compare_note": f"No comparison: {error}"}
    rows = [
        {
            **{key: row[key] for key in ("condition", "mean", "baseline_mean", "p_adjusted", "verdict", "sentence")},
            **{key: row["test"][key] for key in ("difference", "interval", "bootstrap_interval", "p_value")},
            **{key: row["test"][key] for key in ("permutation_p", "cohens_d")},
            "seeds": len(row["seeds"]),
        }
        for row in told["comparisons"]
    ]
    told["notes"] += early_stops([str(folder) for folder in folders])
    said = {row["sentence"] for row in rows}
    notes = [line.strip() for line in explanation_lines(told) if line not in said]
    place = f"{told['metric']} at step {told['step']}"
    baseline = told["comparisons"][0]["baseline"]
    return {"compare": {"metric": place, "baseline": baseline, "rows": rows, "notes": notes}, "compare_note": ""}


def _other_time(row: Mapping[str, Any]) -> float | None:
    whole = row.get("step_time_s")
    if whole is None:
        return None
    parts = (row.get(key) or 0.0 for key in ("sample_time_s", "score_time_s", "train_time_s"))
    return max(0.0, float(whole) - sum(parts))


def differing_options(runs: Sequence[RunRecord]) -> tuple[list[str], list[Data]]:
    """Options that conditions differ in, one column a condition, the first run of each speaking for it."""
    columns = list(dict.fromkeys(run.condition for run in runs))
    configs = {run.condition: values_of(run.config) for run in reversed(runs)}
    rows = []
    for path in values_of(runs[0].config):
        values = [configs[name].get(path) for name in columns]
        if path not in PLACES and any(value != values[0] for value in values):
            rows.append({"option": path, "values": [show_value(value) for value in values]})
    return columns, rows


def shared_settings(runs: Sequence[RunRecord]) -> list[Data]:
    """Options that all runs set to the same value, other than the default."""
    options, every = options_by_path(), [values_of(run.config) for run in runs]
    return [
        {"option": path, "value": show_value(value)}
        for path, value in every[0].items()
        if path in options
        and path not in (*PLACES, "plugins.search_paths")
        and value != options[path].default
        and all(values.get(path) == value for values in every)
    ]


def describe_origin(folders: Iterable[Path]) -> list[str]:
    """Where, when and with what each campaign was run, in sentences."""
    told = []
    for folder in folders:
        table = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
        if not table:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in (table.get("versions") or {}).items())
        git = table.get("git") or {}
        state = f"git {str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}" if git else "no git"
        told.append(
            f"{folder.resolve().name}: {table.get('status')}, started {table.get('started')}, ended "
            f"{table.get('ended') or 'not yet'}, on {table.get('host')}; {versions}; {state}."
        )
    return told


def find_squeeze(folders: Iterable[Path]) -> Data | None:
    """The rank analysis of a campaign, where there is one."""
    for folder in folders:
        squeeze = read_manifest(folder).get("squeeze") if (folder / MANIFEST).is_file() else None
        if squeeze and squeeze.get("ranks"):
            return {"recommended_rank": squeeze["recommended_rank"], "ranks": squeeze["ranks"]}
    return None


def collect_groups(runs: Sequence[RunRecord]) -> tuple[list[Data], str]:
    """Completions by group, as many as a page can hold: whole steps, spread evenly over each run."""
    share = max(1, MOST_COMPLETIONS // len(runs))
    groups: list[Data] = []
    held = total = 0
    for index, run in enumerate(runs):
        wanted, count = _steps_that_fit(run, share)
        total += count
        own = list(_groups_of(index, run, wanted))
        held += sum(len(group["members"]) for group in own)
        groups += own
    return groups, f"{held} of {total} completions: whole steps, spread over each run."


def _steps_that_fit(run: RunRecord, most: int) -> tuple[set[int], int]:
    """Steps whose completions stay below `most` and below the run's share of characters, the last one always."""
    sizes: Counter[int] = Counter()
    characters = 0
    for row in read_lines(run.path / GENERATIONS):
        sizes[row["step"]] += 1
        characters += len(row["completion"])
    steps, total = sorted(sizes), sum(sizes.values())
    if not steps:
        return set(), 0
    room = min(most, int(total * MOST_CHARACTERS * most / MOST_COMPLETIONS / max(1, characters)))
    fitting = max(1, min(len(steps), room * len(steps) // max(1, total)))
    gap = max(1, fitting - 1)
    return {steps[round(at * (len(steps) - 1) / gap)] for at in range(fitting)} | {steps[-1]}, total


def _groups_of(index: int, run: RunRecord, steps: set[int]) -> Iterator[Data]:
    """The groups of the wanted steps; completions of one prompt stand together in the log."""
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
    """Token numbers of the last three of these steps that were recorded."""
    there = {int(path.stem[5:]) for path in (run.path / RECORDINGS).glob("step_*.npz")}
    wanted = sorted(there & steps)[-3:]
    if not wanted:
        return {}
    from retrain.report.tokens import token_numbers  # noqa: PLC0415  (loads the tokenizer's libraries)

    return dict(token_numbers(run.path, run.config, wanted))


def read_lines(path: Path) -> Iterator[Data]:
    """The whole rows of a JSONL file; a torn one is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from whole_rows(lines)
