"""The completions of a step that take part in credit assignment, laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrain.advantages.ragged import Ragged, Scalar
from retrain.errors import PluginError, RetrainError, RolloutError
from retrain.types import BoolArray, Completion, FloatArray, IntArray


@dataclass(frozen=True)
class Row:
    """One scored completion: where it stands in the step, its reward and its tokens."""

    group: int
    index: int
    reward: float
    completion: Completion
    planning_T: BoolArray | None = None

    @property
    def group_place(self) -> str:
        """What to call its group in a message."""
        return f"group {self.group}"

    @property
    def place(self) -> str:
        """What to call it in a message."""
        return f"group {self.group}, completion {self.index}"


@dataclass(frozen=True)
class TokenBatch:
    """Flat arrays over the tokens of all rows. `groups` runs over rows, `tokens` over tokens.

    A mask that is None costs nothing: no `planning` means no planning tokens, no `sampled` that the model wrote all.
    """

    rows: tuple[Row, ...]
    groups: Ragged
    tokens: Ragged
    rewards: FloatArray
    logprobs: FloatArray
    planning: BoolArray | None
    sampled: BoolArray | None

    @cached_property
    def entropies(self) -> FloatArray | None:
        """True entropies, or None where one completion or more came without. Laid out only when asked for."""
        entropies = [row.completion.entropies_T for row in self.rows]
        known = [one for one in entropies if one is not None]
        return _flatten(known) if len(known) == len(entropies) else None

    @cached_property
    def execution(self) -> BoolArray:
        """Tokens that the model wrote and that are not planning."""
        written = np.ones(self.tokens.total, dtype=np.bool_) if self.sampled is None else self.sampled
        return written if self.planning is None else written > self.planning

    @property
    def planned(self) -> BoolArray:
        """Planning tokens that the model wrote."""
        return np.zeros(self.tokens.total, dtype=np.bool_) if self.planning is None else self.planning

    def find(self, index: int) -> str:
        """What to call a flat index in a message."""
        row, token = self.tokens.locate(index)
        return f"{self.rows[row].place}, token {token}"


def lay_out(rows_P: Sequence[Sequence[Row]]) -> TokenBatch:
    """Lay the rows of all groups end to end, checking that every per-token array fits its completion."""
    rows = tuple(row for rows in rows_P for row in rows)
    for row in rows:
        _check_row(row)
    completions = [row.completion for row in rows]
    sampled = _flatten_masks([one.sampled_T for one in completions], completions, missing=True)
    planning = _flatten_masks([row.planning_T for row in rows], completions, missing=False)
    if planning is not None and sampled is not None:
        planning &= sampled
    return TokenBatch(
        rows=rows,
        groups=Ragged.of(rows_P),
        tokens=Ragged.of([one.logprobs_T for one in completions]),
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        logprobs=_flatten([one.logprobs_T for one in completions]),
        planning=planning,
        sampled=sampled,
    )


def read_rows(tokens: Ragged, flat: NDArray[Scalar]) -> tuple[NDArray[Scalar], ...]:
    """The rows of a flat array, as views that a plug-in cannot write to."""
    view = flat.view()
    view.flags.writeable = False
    return tuple(tokens.split(view))


def call_plugin(who: str, where: str, call: Callable[[], object]) -> object:
    """Call third-party code; whatever it raises becomes a PluginError that says who and where."""
    try:
        return call()
    except RetrainError:
        raise
    # SystemExit: a plug-in that calls sys.exit must not end the run without a word.
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} raised {error!r} at {where}.") from error


def check_values(who: str, where: str, unit: str, values: object, indices: IntArray) -> FloatArray:
    """A plug-in's numbers as an array, one for each of `indices`, or a PluginError that says whose and where."""
    array = _as_numbers(who, where, values)
    if array.shape != indices.shape:
        got = f"{len(array)} values" if array.ndim == 1 else f"an array of shape {array.shape}"
        raise PluginError(f"{who} returned {got} for {len(indices)} {unit}s at {where}.")
    finite = np.isfinite(array)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise PluginError(f"{who} returned {array[bad]} at {where}, {unit} {indices[bad]}.")
    return array


def check_flat(who: str, batch: TokenBatch, values: object) -> FloatArray:
    """The same for one value a token of the whole batch; the place it names is a completion and a token."""
    flat = _as_numbers(who, "the whole batch", values)
    if flat.shape != (batch.tokens.total,):
        raise PluginError(
            f"{who} returned an array of shape {flat.shape} for the {batch.tokens.total} tokens of a batch."
        )
    finite = np.isfinite(flat)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise PluginError(f"{who} returned {flat[bad]} at {batch.find(bad)}.")
    return flat


def _as_numbers(who: str, where: str, values: object) -> FloatArray:
    try:
        # ArrayLike covers all that asarray accepts; what it does not accept it refuses below.
        numbers: Any = values
        array: FloatArray = np.asarray(numbers, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PluginError(f"{who} returned {type(values).__name__}, not numbers, at {where}: {error}") from error
    return array


def _check_row(row: Row) -> None:
    completion = row.completion
    length = len(completion.logprobs_T)
    arrays: Iterable[tuple[str, ArrayLike | None]] = (
        ("token ids", completion.token_ids_T),
        ("entropies", completion.entropies_T),
        ("sampled mask", completion.sampled_T),
        ("planning mask", row.planning_T),
    )
    for what, array in arrays:
        if array is not None and np.shape(array) != (length,):
            raise RolloutError(f"{row.place}: {what} of shape {np.shape(array)} for {length} log-probs.")
    if not np.isfinite(row.reward):
        raise RolloutError(f"{row.place}: the reward is {row.reward}, which is no finite number.")


def _flatten(arrays: Sequence[FloatArray]) -> FloatArray:
    # An empty first array keeps a batch without completions legal.
    return np.concatenate([np.zeros(0), *arrays], dtype=np.float64)


def _flatten_masks(
    masks: Sequence[BoolArray | None], completions: Sequence[Completion], *, missing: bool
) -> BoolArray | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        np.full(len(one.logprobs_T), missing) if mask is None else np.asarray(mask, dtype=np.bool_)
        for mask, one in zip(masks, completions, strict=True)
    ]
    return np.concatenate(filled)
