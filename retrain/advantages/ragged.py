"""Rows of unequal length in one flat array.

All per-token computations run on such arrays, at the cost of a few passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from retrain.types import BoolArray, FloatArray, IntArray

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Ragged:
    """Layout of a flat array: row i has `lengths[i]` values from `starts[i]` on. Rows may be empty."""

    lengths: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[object] | NDArray[np.generic]]) -> Ragged:
        """The layout of these rows."""
        return cls(np.array([len(row) for row in rows], dtype=np.int64))

    @cached_property
    def ends(self) -> IntArray:
        """End of each row, exclusive."""
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def starts(self) -> IntArray:
        """Start of each row."""
        return self.ends - self.lengths

    @property
    def total(self) -> int:
        """Total number of values."""
        return int(self.lengths.sum())

    def sum(self, flat: FloatArray) -> FloatArray:
        """The sum of each row; 0 for an empty one."""
        totals = np.zeros(len(self.lengths))
        # reduceat returns the value at the start of an empty row instead of 0.
        filled = self.lengths > 0
        if filled.any():
            totals[filled] = np.add.reduceat(flat, self.starts[filled])
        return totals

    def count(self, mask: BoolArray) -> IntArray:
        """Number of True values per row."""
        counts = np.zeros(len(self.lengths), dtype=np.int64)
        filled = self.lengths > 0
        if filled.any():
            counts[filled] = np.add.reduceat(mask, self.starts[filled], dtype=np.int64)
        return counts

    def repeat(self, per_row: FloatArray) -> FloatArray:
        """Repeat each row's value over the row."""
        return np.repeat(per_row, self.lengths)

    def split(self, flat: NDArray[Scalar]) -> list[NDArray[Scalar]]:
        """The rows of a flat array, as views of it."""
        return [flat[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def locate(self, index: int) -> tuple[int, int]:
        """Row and position of a flat index."""
        row = int(np.searchsorted(self.ends, index, side="right"))
        return row, index - int(self.starts[row])


def divide(sums: FloatArray, counts: IntArray) -> FloatArray:
    """Row means from row sums and counts; 0 for empty rows."""
    return np.divide(sums, counts, out=np.zeros(len(sums)), where=counts > 0)
