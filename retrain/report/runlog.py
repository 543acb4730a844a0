"""One run as it grows: its files are read from where the last read ended."""

from __future__ import annotations

import hashlib
import math
import os
import time
from pathlib import Path

from retrain.analysis.health import METRIC_KEYS, check_health
from retrain.analysis.runs import RunRecord, read_config
from retrain.analysis.scoring import read_inputs
from retrain.config import TrainConfig
from retrain.report.columns import Columns
from retrain.report.completions import CompletionIndex
from retrain.storage.aside import CONFIG_FILE
from retrain.storage.checkpoint import last_edit, read_state
from retrain.storage.logs import EVALS, GENERATIONS, METRICS, has_step, only_evaluations, parse_rows
from retrain.storage.tail import Tail
from retrain.types import JsonObject

# A larger log is first shown from rows picked all over it, while the rest is read.
PREVIEW_BYTES = 4 << 20
PREVIEW_ROWS = 600
_EDGE_BYTES = 1 << 16


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written again; None without the file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class RunLog:
    """The configuration, metrics, evaluations and completions of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:10]
        self._written = _stamp(path / CONFIG_FILE)
        self.config: TrainConfig
        self.config, self.edits = read_config(path, read_state(path))
        self.columns = Columns()
        self.evaluations: dict[int, JsonObject] = {}
        self.completions = CompletionIndex(path / GENERATIONS, self.config.training.group_size)
        self.loading = 1.0
        """The share of metrics.jsonl that was read."""
        self.torn = 0
        self.epoch = 0
        """Increases when what was read before is no longer valid."""
        self._reading = self.columns
        self._metrics, self._evals = Tail(path / METRICS), Tail(path / EVALS)
        self._health: tuple[tuple[int, ...], list[JsonObject]] = ((), [])

    def is_replaced(self) -> bool:
        """Whether another run is in the folder now, or this one was resumed with other options."""
        return _stamp(self.path / CONFIG_FILE) not in (self._written, None)

    def update(self, budget_s: float = float("inf")) -> bool:
        """Read what was appended, for about `budget_s` seconds; returns whether everything was read."""
        until = time.monotonic() + budget_s
        if self._metrics.has_changed() or self._evals.has_changed():
            self._start_over()
        if (
            not self._metrics.offset
            and budget_s < float("inf")
            and self._size() > PREVIEW_BYTES
            and not len(self.columns)
        ):
            self._preview()
            self._read_evaluations()
            self.loading = 0.0
            return False
        while lines := self._metrics.read():
            self._read_metrics(lines)
            if time.monotonic() > until:
                break
        # A torn last line may never get complete: it does not count.
        is_done = not lines
        self.loading = 1.0 if is_done else min(0.999, self._metrics.share_read())
        if is_done and self.columns is not self._reading:
            self.columns = self._reading
            self.epoch += 1
        self._read_evaluations()
        return self.completions.update(max(0.0, until - time.monotonic())) and is_done

    def record(self, status: str = "", steps: int = 0) -> RunRecord:
        """The run for the statistics, without the rows of its steps."""
        config, inputs = self.config, read_inputs(read_state(self.path), self.config)
        return RunRecord(
            self.path,
            config.condition,
            config.training.seed,
            config,
            {},
            self.evaluations,
            status,
            self.torn,
            inputs,
            steps,
            edits=self.edits,
        )

    @property
    def edited_at(self) -> int:
        """The step of the last edit of its inputs; see `last_edit`."""
        return last_edit(read_state(self.path), self.columns.steps[-1]) if len(self.columns) else 0

    def rates(self) -> dict[int, JsonObject]:
        """The correct rate of every step, as rows; null where nothing was scored."""
        rates = zip(self.columns.steps, self.columns.column("correct_rate").tolist(), strict=True)
        # Single precision has seven digits.
        return {
            step: {"step": step, "correct_rate": None if math.isnan(rate) else float(f"{rate:.7g}")}
            for step, rate in rates
        }

    def health(self) -> list[JsonObject]:
        """The checks of `retrain.analysis.health`."""
        edited_at = self.edited_at
        version = (self.epoch, len(self.columns), len(self.evaluations), edited_at)
        if self._health[0] != version:
            rows, limit = self.columns.rows(METRIC_KEYS), self.config.training.max_tokens
            checks = check_health(rows, list(self.evaluations.values()), limit, edited_at)
            self._health = version, [vars(check) | {"topic": check.topic} for check in checks]
        return self._health[1]

    def updated(self) -> float | None:
        """When the last step was logged, in seconds since 1970."""
        try:
            return (self.path / METRICS).stat().st_mtime if len(self.columns) else None
        except OSError:
            return None

    def _size(self) -> int:
        try:
            return (self.path / METRICS).stat().st_size
        except OSError:
            return 0

    def _start_over(self) -> None:
        self._metrics.rewind()
        self._evals.rewind()
        self._reading = self.columns = Columns()
        self.evaluations, self.torn = {}, 0
        self.epoch += 1

    def _read_metrics(self, lines: list[bytes]) -> None:
        rows = [row for row in parse_rows(lines) if has_step(row)]
        self.torn += sum(1 for line in lines if line.strip()) - len(rows)
        self._reading.extend(rows)

    def _read_evaluations(self) -> None:
        while lines := self._evals.read():
            self.evaluations |= {int(row["step"]): row for row in only_evaluations(parse_rows(lines))}
        self.evaluations = dict(sorted(self.evaluations.items()))

    def _preview(self) -> None:
        """Rows from both ends of the file, and from evenly spaced places in between."""
        self._reading, size = Columns(), self._size()
        lines: list[bytes] = []
        with (self.path / METRICS).open("rb") as file:
            lines += file.read(_EDGE_BYTES).split(b"\n")[:-1]
            for at in range(_EDGE_BYTES, size - _EDGE_BYTES, max(1, (size - 2 * _EDGE_BYTES) // PREVIEW_ROWS)):
                file.seek(at)
                file.readline()
                lines.append(file.readline())
            file.seek(max(0, size - _EDGE_BYTES), os.SEEK_SET)
            lines += file.read().split(b"\n")[1:-1]
        rows = {int(row["step"]): row for row in parse_rows(lines) if has_step(row)}
        self.columns = Columns()
        self.columns.extend([row for _, row in sorted(rows.items())])
