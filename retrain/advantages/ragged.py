"""Rows of unequal length laid end to end in one flat array.

Every per-token computation of this package runs on such arrays, so that its cost is that of a few passes over memory
whatever the number of completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrain.types import BoolArray, FloatArray, IntArray

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Ragged:
    """How a flat array divides into rows: row i holds `lengths[i]` values from `starts[i]` on. Rows may be empty."""

    lengths: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[object] | NDArray[Any]]) -> Ragged:
        """The layout of these rows."""
        return cls(np.array([len(row) for row in rows], dtype=np.int64))

    @cached_property
    def ends(self) -> IntArray:
        """Where each row ends, exclusive."""
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def starts(self) -> IntArray:
        """Where each row begins."""
        return self.ends - self.lengths

    @property
    def total(self) -> int:
        """Values in all rows together."""
        return int(self.lengths.sum())

    def sum(self, flat: FloatArray) -> FloatArray:
        """The sum of each row; 0 for an empty one."""
        totals = np.zeros(len(self.lengths))
        # reduceat returns the value AT the start of an empty row instead of 0, so empty rows must not reach it.
        filled = self.lengths > 0
        if filled.any():
            totals[filled] = np.add.reduceat(flat, self.starts[filled])
        return totals

    def count(self, mask: BoolArray) -> IntArray:
        """How many values of each row are True."""
        counts = np.zeros(len(self.lengths), dtype=np.int64)
        filled = self.lengths > 0
        if filled.any():
            counts[filled] = np.add.reduceat(mask, self.starts[filled], dtype=np.int64)
        return counts

    def spread(self, per_row: FloatArray) -> FloatArray:
        """A flat array that repeats each row's one value over the row."""
        return np.repeat(per_row, self.lengths)

    def split(self, flat: NDArray[Scalar]) -> list[NDArray[Scalar]]:
        """The rows of a flat array, as views of it."""
        return [flat[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def locate(self, index: int) -> tuple[int, int]:
        """Row and place in that row of a flat index."""
        row = int(np.searchsorted(self.ends, index, side="right"))
        return row, index - int(self.starts[row])


def divide(sums: FloatArray, counts: IntArray) -> FloatArray:
    """Row means from row sums and counts; 0 where a row has nothing to average."""
    return np.divide(sums, counts, out=np.zeros(len(sums)), where=counts > 0)
