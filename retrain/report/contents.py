"""The data of the report, read from run folders: curves, evaluations, statistics, settings and completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from retrain.analysis.change import Row, comparable, scored
from retrain.analysis.health import BAD
from retrain.analysis.runs import RunRecord, find_runs, read_manifest
from retrain.campaign.progress import read_progress
from retrain.config.options import options_by_path, paths_where, values_of
from retrain.config.toml import show_value
from retrain.errors import CheckpointError
from retrain.manual import read_manual
from retrain.report.runlog import RunLog
from retrain.report.verdict import describe_verdict
from retrain.runtime.text import plural
from retrain.storage.logs import EVAL_PROBLEMS, MANIFEST, parse_rows
from retrain.storage.recording import find_recordings
from retrain.types import JsonObject

Data = JsonObject

# Limits that keep a file small enough to send. `retrain ui` has none.
MAX_COMPLETIONS = 4000
MAX_BYTES = 8_000_000
MAX_FLIPS = 500
PROMPT_CHARACTERS = 600


def collect(folders: Sequence[Path]) -> Data:
    """Everything that a page shows, for a file that works without a server."""
    logs: dict[Path, RunLog] = {}
    runs = find_logs(folders, logs)
    found = [logs[run.path] for run in runs]
    groups, note = collect_groups(found)
    return {
        **describe_folders(runs, found, folders),
        "live": 0,
        "runs": [describe_run(run, log) | log.columns.buckets() for run, log in zip(runs, found, strict=True)],
        "groups": groups,
        "groups_note": note,
    }


def find_logs(folders: Sequence[Path], logs: dict[Path, RunLog], budget_s: float = float("inf")) -> list[RunRecord]:
    """The runs in these folders, read from where `logs` ended, for about `budget_s` seconds in all."""
    until = time.monotonic() + budget_s

    def read(path: Path) -> RunRecord:
        if path not in logs:
            logs[path] = RunLog(path)
        elif logs[path].is_replaced():
            earlier, logs[path] = logs[path], RunLog(path)
            logs[path].epoch = earlier.epoch + 1
        logs[path].update(max(0.02, until - time.monotonic()))
        progress = read_progress(path, checks=False)
        return logs[path].record(progress.status, progress.step)

    return find_runs(folders, tell_apart=True, read=read)


def describe_folders(runs: Sequence[RunRecord], logs: Sequence[RunLog], folders: Sequence[Path]) -> Data:
    """Everything that belongs to all runs together."""
    conditions = len({run.condition for run in runs})
    columns, differences = differing_options(runs)
    return {
        "title": f"retrain: {', '.join(folder.resolve().name for folder in folders)}",
        "subtitle": f"{plural(len(runs), 'run')}, {plural(conditions, 'condition')}",
        "models": list(dict.fromkeys(run.config.model.model for run in runs)),
        "is_adapter": bool(runs and runs[0].config.model.lora_rank),
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "verdict": describe_verdict(runs, logs),
        "squeeze": find_squeeze(folders),
        "configs": differences,
        "config_columns": columns,
        "settings": shared_settings(runs) if runs else [],
        "origin": describe_origin(folders),
        "advice": find_advice(logs),
    }


def find_advice(logs: Sequence[RunLog]) -> dict[str, list[JsonObject]]:
    """What the manual says on the checks that are not ok: its blocks by topic, most severe first."""
    bad = [check for log in logs for check in log.health() if check["level"] in BAD]
    topics = dict.fromkeys(check["topic"] for check in sorted(bad, key=lambda check: -BAD.index(check["level"])))
    manual = read_manual() if topics else None
    return {topic: [vars(block) for block in manual.find(topic).blocks] for topic in topics} if manual else {}


def describe_run(run: RunRecord, log: RunLog) -> Data:
    """The totals, evaluations and checks of one run; its curves are `log.columns.buckets()`."""
    columns, progress = log.columns, read_progress(run.path, checks=False)
    rates, times = columns.column("correct_rate"), columns.column("step_time_s")
    late = rates[-max(1, len(rates) // 10) :]
    evals = [_evaluation(row) for row in scored(run.evaluations.values())]
    return {
        "id": log.id,
        "name": run.path.resolve().name,
        "condition": run.condition,
        "seed": run.seed,
        "status": run.status or progress.status,
        "error": progress.error,
        "done": max(progress.step, columns.steps[-1] + 1) if len(columns) else 0,
        "max_steps": progress.max_steps,
        "max_tokens": run.config.training.max_tokens,
        "is_multi_turn": bool(run.config.environment.provider),
        "updated": log.updated(),
        "loading": round(log.loading, 3),
        "epoch": log.epoch,
        "uncertainty": columns.texts.get("uncertainty_kind", "surprisal"),
        "late_correct_rate": _mean(late),
        "last_eval": evals[-1] if evals else None,
        "median_step_s": float(np.nanmedian(times)) if not np.isnan(times).all() else None,
        "evals": evals,
        "flips": find_flips(run),
        "health": log.health(),
        "totals": {
            # Older logs have only the batch size.
            "groups": round(columns.total("groups_sampled") or columns.total("batch_size")),
            "all_right": round(columns.total("groups_all_right")),
            "all_wrong": round(columns.total("groups_all_wrong")),
            "errors": round(columns.total("reward_errors")),
        },
    }


def _evaluation(row: Row) -> Data:
    rate = row.get("eval_pass_at_1")
    ends = {"low": row.get("eval_ci_low", rate), "high": row.get("eval_ci_high", rate)}
    more = {key: value for key, value in row.items() if key.startswith("eval_") and type(value) in (int, float)}
    return {"x": row["step"], "y": rate, **ends, "k": row.get("k"), "more": more}


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def find_flips(run: RunRecord) -> Data | None:
    """Held-out problems that most completions got right in only one of the first and the last evaluation."""
    rows = comparable([row for row in run.evaluations.values() if row.get("counted")])
    if len(rows) < 2 or len(rows[0]["counted"]) != len(rows[-1]["counted"]):
        return None
    counts = zip(rows[0]["correct"], rows[0]["counted"], rows[-1]["correct"], rows[-1]["counted"], strict=True)
    flips = [
        {"problem": number, "before": [c0, n0], "after": [c1, n1], "gained": 2 * c1 >= n1}
        for number, (c0, n0, c1, n1) in enumerate(counts)
        if n0 and n1 and (2 * c0 >= n0) != (2 * c1 >= n1)
    ]
    problems = _read_problems(run.path) if flips else []
    if len(problems) == len(rows[0]["counted"]):
        flips = [flip | {"prompt": str(problems[flip["problem"]].get("prompt"))[:PROMPT_CHARACTERS]} for flip in flips]
    steps = {"first": rows[0]["step"], "last": rows[-1]["step"], "problems": len(rows[0]["counted"])}
    gained = sum(flip["gained"] for flip in flips)
    return steps | {"gained": gained, "lost": len(flips) - gained, "list": flips[:MAX_FLIPS]}


def _read_problems(path: Path) -> list[Data]:
    try:
        # Only a newline ends a row: prompts may contain other Unicode line breaks.
        return list(parse_rows((path / EVAL_PROBLEMS).read_bytes().split(b"\n")))
    except OSError:
        return []


def differing_options(runs: Sequence[RunRecord]) -> tuple[list[str], list[Data]]:
    """Options that differ between conditions, one column per condition, taken from its first run."""
    columns = list(dict.fromkeys(run.condition for run in runs))
    configs = {run.condition: values_of(run.config) for run in reversed(runs)}
    rows = []
    for path in values_of(runs[0].config) if runs else ():
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


def collect_groups(logs: Sequence[RunLog]) -> tuple[list[Data], str]:
    """Completions by group, up to the limits of a file: complete steps, evenly spaced over each run."""
    groups: list[Data] = []
    held = total = 0
    for log in logs:
        steps = _steps_that_fit(log, max(1, len(logs)))
        total += log.completions.total
        numbers = [number for step in steps for number in log.completions.groups_of(step)]
        held += sum(log.completions.counts[number] for number in numbers)
        recorded = token_rows(log, steps)
        for group in log.completions.read(numbers):
            groups.append(add_tokens(group, recorded.get(group["step"], [])) | {"run": log.id})
    if held == total:
        return groups, f"All {plural(total, 'completion')} that the runs logged."
    return groups, (
        f"{held:,} of {total:,} completions: complete steps, evenly spaced over each run. retrain ui shows all of "
        "them; they are in emergence/generations.jsonl."
    )


def _steps_that_fit(log: RunLog, runs: int) -> list[int]:
    """Evenly spaced steps within the limits of completions and bytes, always with the last one."""
    index = log.completions
    steps = [step for step, _ in index.list_steps()]
    if not steps:
        return []
    room = min(MAX_COMPLETIONS / runs / index.total, MAX_BYTES / runs / max(1, index.end))
    fitting = max(1, min(len(steps), int(room * len(steps))))
    gap = max(1, fitting - 1)
    return sorted({steps[round(at * (len(steps) - 1) / gap)] for at in range(fitting)} | {steps[-1]})


def recorded_steps(log: RunLog) -> list[int]:
    """Steps whose rollouts were recorded."""
    return list(find_recordings(log.path))


def token_rows(log: RunLog, steps: Sequence[int]) -> dict[int, list[list[Data]]]:
    """Token data of the last three recorded steps."""
    wanted = sorted(set(recorded_steps(log)) & set(steps))[-3:]
    if not wanted:
        return {}
    from retrain.report.tokens import token_data  # noqa: PLC0415  (loads the tokenizer's libraries)

    rows: dict[int, list[list[Data]]] = {}
    # Later advantages may depend on a damaged recording, so they are left out with it.
    with suppress(CheckpointError):
        for step, groups in token_data(log.path, log.config, wanted):
            rows[step] = [[dict(tokens) for tokens in group] for group in groups]
    return rows


def add_tokens(group: Data, recorded: Sequence[Sequence[Data]]) -> Data:
    """A group with token data where its completions were recorded."""
    numbers = recorded[group["at"]] if group["at"] < len(recorded) else []
    for member, tokens in zip(group["members"], numbers, strict=False):
        # Older logs count the tokens of the environment, too.
        if member.get("num_tokens") in (sum(tokens.get("sampled") or [1] * len(tokens["text"])), len(tokens["text"])):
            member["tokens"] = tokens
    return group
