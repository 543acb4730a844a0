"""The report of runs in progress: what a live page asks a server for.

One thread reads what was appended to the logs; requests only look at what it has read, so they cannot pile up.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from retrain.analysis.runs import RunRecord
from retrain.report.completions import matches
from retrain.report.contents import describe_folders, describe_run, find_logs, recorded_steps, token_rows
from retrain.report.runlog import RunLog
from retrain.types import JsonObject

PAUSE_S = 1.0
"""Between two looks at the folders."""
BUDGET_S = 0.3
"""Reading time per look; requests wait for it."""
COMPARE_EVERY_S = 10.0
EARLY_STEPS = 20
"""Steps until which everything is described at every look."""
SEARCH_S = 1.0
"""Time of one search through completions; the page continues where it ended."""
PAGE_BYTES = 2_000_000


class Known(NamedTuple):
    """What a page has of a run."""

    version: str
    epoch: int
    size: int
    rows: int


class LiveReport:
    """The state of some folders, kept current by `refresh`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.logs: dict[Path, RunLog] = {}
        self.runs: list[RunRecord] = []
        self.head: JsonObject = {}
        self.head_version = ""
        self.problem = ""
        self._lock = threading.Lock()
        self._token_lock = threading.Lock()
        self._compared = (0.0, "", 0)
        self._tokens: tuple[tuple[str, int, int], list[list[JsonObject]]] = (("", -1, 0), [])

    def follow(self) -> None:
        """Refresh until the process ends."""
        while True:
            started = time.monotonic()
            is_loading = self.refresh()
            if not is_loading:
                time.sleep(max(PAUSE_S, time.monotonic() - started))

    def refresh(self) -> bool:
        """Read what was appended; returns whether there is more to read."""
        try:
            with self._lock:
                runs = find_logs(self.folders, self.logs, BUDGET_S)
                self.runs, self.problem = runs, ""
                self._describe()
        except Exception as error:
            # Before the first step there is no run; a folder may be moved while it is read, or hold anything.
            self.problem = str(error) or type(error).__name__
            if not self.runs:
                self.head = {
                    "title": "retrain",
                    "subtitle": "",
                    "verdict": {"kind": "waiting", "rows": [], "notes": []},
                }
                self.head["verdict"]["sentence"] = "Waiting for the first step."
                self.head_version = "waiting"
            return False
        return any(log.loading < 1 or log.completions.share_read < 1 for log in self._found())

    def _found(self) -> list[RunLog]:
        return [self.logs[run.path] for run in self.runs]

    def _describe(self) -> None:
        """Describe all runs together, when evaluations or statuses changed, and now and then when steps did."""
        logs = self._found()
        pairs = zip(self.runs, logs, strict=True)
        seen = str([(log.id, run.status, len(run.evaluations), log.epoch) for run, log in pairs])
        rows = sum(len(log.columns) for log in logs)
        when, seen_before, rows_before = self._compared
        is_recent = time.monotonic() - when < COMPARE_EVERY_S and rows_before > EARLY_STEPS
        if seen == seen_before and (rows == rows_before or is_recent):
            return
        self._compared = (time.monotonic(), seen, rows)
        self.head = describe_folders(self.runs, logs, self.folders)
        stable = json.dumps({key: value for key, value in self.head.items() if key != "created"}, sort_keys=True)
        self.head_version = hashlib.sha256(stable.encode()).hexdigest()[:12]

    def poll(self, known: Mapping[str, Known], head: str) -> JsonObject:
        """What changed since the page's last request, which had `known` of each run."""
        with self._lock:
            answer: JsonObject = {
                "now": time.time(), "problem": self.problem, "head_version": self.head_version,
                "runs": [self._changes(run, known) for run in self.runs],
            }  # fmt: skip
            if head != self.head_version:
                answer["head"] = self.head
        return answer

    def _changes(self, run: RunRecord, known: Mapping[str, Known]) -> JsonObject:
        log = self.logs[run.path]
        rows, index = len(log.columns), log.completions
        parts = (log.epoch, rows, len(run.evaluations), run.status, index.total, round(log.loading, 2), run.condition)
        version = hashlib.sha256(str(parts).encode()).hexdigest()[:8]
        before = known.get(log.id, Known("", -1, 0, 0))
        if before.version == version:
            return {"id": log.id, "updated": log.updated()}
        description = describe_run(run, log) | {"version": version, "index": self._index(log)}
        if (before.epoch, before.size) != (log.epoch, log.columns.bucket_size()) or before.rows > rows:
            return description | log.columns.buckets()
        # The last bucket may have been incomplete.
        return description | (log.columns.buckets(max(0, before.rows - 1)) if before.rows < rows else {})

    def _index(self, log: RunLog) -> JsonObject:
        index = log.completions
        ends = [index.steps[0], index.steps[-1]] if len(index) else []
        return {"total": index.total, "groups": len(index), "read": round(index.share_read, 3), "ends": ends}

    def window(self, run_id: str, first: int, last: int) -> JsonObject:
        """The curves of a range of steps, for a page that zooms in."""
        with self._lock:
            return self._log(run_id).columns.window(first, last)

    def groups(self, wanted: Mapping[str, str]) -> JsonObject:
        """A page of groups that match, and where the next one begins; None at the end."""
        with self._lock:
            places = self._places(wanted)
        at, until = int(wanted.get("from") or 0), time.monotonic() + SEARCH_S
        found: list[JsonObject] = []
        size = 0
        while at < len(places) and len(found) < int(wanted.get("count") or 100) and size < PAGE_BYTES:
            log, number = places[at]
            at += 1
            for group in log.completions.read([number]):
                if matches(group, wanted, log.config.training.max_tokens):
                    found.append(group | {"run": log.id})
                    size += log.completions.bytes_of([number])
            if time.monotonic() > until:
                break
        return {"groups": found, "next": at if at < len(places) else None, "places": len(places)}

    def _places(self, wanted: Mapping[str, str]) -> list[tuple[RunLog, int]]:
        """The groups of the wanted runs, step and prompt; `upto` has the groups of each run that the page knew of."""
        limits = dict(entry.split(":") for entry in filter(None, wanted.get("upto", "").split(",")))
        places: list[tuple[RunLog, int]] = []
        for run in self.runs:
            log = self.logs[run.path]
            if wanted.get("run") not in (None, "", log.id) or wanted.get("condition") not in (None, "", run.condition):
                continue
            index = log.completions
            if wanted.get("prompt"):
                numbers: Sequence[int] = index.groups_with(int(wanted["prompt"]))
            else:
                numbers = index.groups_of(int(wanted["step"])) if wanted.get("step") else range(len(index))
            limit = int(limits.get(log.id, len(index)))
            kept = [(log, number) for number in numbers if number < limit]
            places += kept if wanted.get("order") == "oldest" else reversed(kept)
        return places

    def tokens(self, run_id: str, step: int) -> list[list[JsonObject]]:
        """Token data of a recorded step, by group and completion."""
        with self._lock:
            log = self._log(run_id)
        if step not in recorded_steps(log):
            return []
        with self._token_lock:
            key = (run_id, step, log.epoch)
            if self._tokens[0] == key:
                return self._tokens[1]
            # In a process of its own, which returns the memory of the tokenizer's libraries.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                self._tokens = key, pool.submit(_read_tokens, log.path, step).result()
            return self._tokens[1]

    def _log(self, run_id: str) -> RunLog:
        return next(log for log in self._found() if log.id == run_id)


def _read_tokens(path: Path, step: int) -> list[list[JsonObject]]:
    return token_rows(RunLog(path), [step]).get(step, [])
