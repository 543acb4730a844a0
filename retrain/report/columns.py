"""The numbers of a growing metrics.jsonl: every numeric metric as a column, thinned for drawing.

A long run is drawn from buckets of 2, 4, 8… steps with the mean, the lowest and the highest value of each. Bucket
borders do not move as rows are appended, so that a live page only needs the buckets that changed.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from retrain.types import FloatArray, JsonObject

Row = Mapping[str, Any]

MAX_POINTS = 1000
"""Buckets per line."""
NOT_DRAWN = frozenset({"step"})
_PARTS = ("sample_time_s", "score_time_s", "train_time_s")
_NAN = math.nan


class Columns:
    """Columns by metric. Values are single precision: 100,000 steps of 40 metrics take 16 MB."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.tokens: array[float] = array("d")
        """Sampled tokens up to and including each step."""
        self.hours: array[float] = array("d")
        self.values: dict[str, array[float]] = {}
        self.texts: dict[str, str] = {}
        """The latest value of each metric that is a text."""

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, rows: Sequence[Row]) -> None:
        """Append rows. A step that was written before replaces it and everything after it."""
        for start, stop in _ascending(rows):
            part = rows[start:stop]
            self._cut(int(part[0]["step"]))
            self._append(part)

    def column(self, key: str) -> FloatArray:
        """All values of a metric; NaN where it was not logged."""
        found = np.full(len(self), _NAN, dtype=np.float32)
        if key in self.values:
            held = np.array(self.values[key], dtype=np.float32)
            found[: len(held)] = held
        return found

    def total(self, key: str) -> float:
        """The sum of a metric over the run."""
        return float(np.nansum(self.column(key), dtype=np.float64))

    def bucket_size(self) -> int:
        """Steps per bucket of the whole run."""
        return _size_for(len(self))

    def buckets(self, since: int = 0) -> JsonObject:
        """The bucket that contains row `since`, and all later ones."""
        size = self.bucket_size()
        start = since // size * size
        return {"size": size, "rows": len(self), "from": start // size} | self._curves(start, len(self), size)

    def window(self, first: int, last: int) -> JsonObject:
        """The steps of a range, in smaller buckets than those of the whole run."""
        start, stop = bisect_left(self.steps, first), bisect_right(self.steps, last)
        return self._curves(start, stop, _size_for(stop - start))

    def _curves(self, start: int, stop: int, size: int) -> JsonObject:
        ends = [min(at + size, stop) - 1 for at in range(start, stop, size)]
        found: JsonObject = {
            "steps": [self.steps[at] for at in ends],
            "tokens": [round(self.tokens[at]) for at in ends],
            "hours": _round(np.array([self.hours[at] for at in ends])),
            "series": {}, "low": {}, "high": {},
        }  # fmt: skip
        for key in self.keys():
            low, mean, high = _fold(self.column(key)[start:stop], size)
            found["series"][key] = _round(mean)
            if size > 1:
                found["low"][key], found["high"][key] = _round(low), _round(high)
        return found

    def keys(self) -> list[str]:
        """Metrics with at least one number, in the order of their first appearance."""
        return [*self.values]

    def rows(self, keys: Sequence[str], most: int = 4000, edge: int = 100) -> list[JsonObject]:
        """Rows for the health checks; of a long run means over blocks, except at both ends."""
        count = len(self)
        block = max(1, math.ceil((count - 2 * edge) / most)) if count > most else 1
        inner = range(edge, count - edge, block) if block > 1 else range(edge, count)
        starts = [*range(min(edge, count)), *inner, *(range(count - edge, count) if block > 1 else ())]
        if not starts:
            return []
        columns = {key: self.column(key) for key in keys if key in self.values}
        means = {}
        for key, values in columns.items():
            counts = np.add.reduceat((~np.isnan(values)).astype(np.int64), starts)
            sums = np.add.reduceat(np.nan_to_num(values).astype(np.float64), starts)
            # A rate is averaged over the block, rare events are counted.
            means[key] = np.where(counts > 0, sums / (1 if key == "rows_excluded" else np.maximum(counts, 1)), _NAN)
        return [
            {"step": self.steps[at], **self.texts}
            | {key: value for key in means if not math.isnan(value := float(means[key][index]))}
            for index, at in enumerate(starts)
        ]

    def _append(self, rows: Sequence[Row]) -> None:
        before = len(self.steps)
        self.steps.extend([row["step"] for row in rows])
        for key in dict.fromkeys(key for row in rows for key in row):
            found = [row.get(key) for row in rows]
            first = next((value for value in found if value is not None), None)
            if isinstance(first, str):
                self.texts[key] = str(next(value for value in reversed(found) if value is not None))
            elif key not in NOT_DRAWN and not isinstance(first, bool):
                self._put(key, before, _to_numbers(found))
        times = {key: _to_numbers([row.get(key) for row in rows]) for key in (*_PARTS, "step_time_s", "tokens_per_s")}
        parts = np.nan_to_num(np.array([times[key] for key in _PARTS])).sum(axis=0)
        self._put("other_time_s", before, np.maximum(0.0, times["step_time_s"] - parts))
        # A row stands for the steps since the one before it, which may not have been logged, or not read yet.
        gaps = np.diff([self.steps[before - 1] if before else self.steps[0] - 1, *self.steps[before:]])
        tokens = np.nan_to_num(times["tokens_per_s"] * times["sample_time_s"]) * gaps
        for column, added in ((self.tokens, tokens), (self.hours, np.nan_to_num(times["step_time_s"]) * gaps / 3600)):
            column.frombytes(((column[-1] if before else 0.0) + np.cumsum(added)).tobytes())

    def _put(self, key: str, before: int, numbers: FloatArray) -> None:
        column = self.values.get(key)
        if column is None:
            if np.isnan(numbers).all():
                return
            column = self.values[key] = array("f")
        if len(column) < before:
            column.extend([_NAN] * (before - len(column)))
        column.frombytes(numbers.clip(-3e38, 3e38).astype(np.float32).tobytes())

    def _cut(self, step: int) -> None:
        if not self.steps or step > self.steps[-1]:
            return
        keep = bisect_left(self.steps, step)
        del self.steps[keep:]
        for column in (self.tokens, self.hours, *self.values.values()):
            del column[keep:]


def _size_for(rows: int) -> int:
    """The smallest power of two with at most MAX_POINTS buckets."""
    return 1 << max(0, math.ceil(rows / MAX_POINTS) - 1).bit_length()


def _ascending(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """The ranges of rows in which steps ascend."""
    breaks = [at for at in range(1, len(rows)) if rows[at]["step"] <= rows[at - 1]["step"]]
    edges = [0, *breaks, len(rows)] if rows else [0]
    return list(pairwise(edges))


def _fold(values: FloatArray, size: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Lowest, mean and highest value of each bucket."""
    if size == 1 or not len(values):
        return values, values, values
    padded = np.full(math.ceil(len(values) / size) * size, _NAN)
    padded[: len(values)] = values
    table = padded.reshape(-1, size)
    counts = (~np.isnan(table)).sum(axis=1)
    mean = np.where(counts > 0, np.nansum(table, axis=1) / np.maximum(counts, 1), _NAN)
    return np.fmin.reduce(table, axis=1), mean, np.fmax.reduce(table, axis=1)


def _round(values: FloatArray) -> list[float | None]:
    """Six significant digits; None for NaN, which JSON lacks."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]


def _to_numbers(values: Sequence[object]) -> FloatArray:
    """Numbers as an array; NaN for None and anything else that is not a number."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([value if isinstance(value, int | float) else _NAN for value in values], dtype=np.float64)
