"""Joins token texts, and maps spans of the text back to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from retrain.types import BoolArray

Span = tuple[int, int]
"""Start and end (exclusive) in characters."""


def join_tokens(token_texts: Sequence[str]) -> str:
    """The completion as one text. Space and newline markers are replaced one to one."""
    return "".join(token_texts).replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")


def mark_spans(token_texts: Sequence[str], spans: Iterable[Span]) -> BoolArray:
    """True on every token that overlaps a span."""
    mask = np.zeros(len(token_texts), dtype=np.bool_)
    bounds = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    if len(bounds) == 0:
        return mask
    lengths = np.fromiter(map(len, token_texts), dtype=np.int64, count=len(token_texts))
    ends = np.cumsum(lengths)
    # From the first token that ends after the start of the span, to the first that starts at its end.
    firsts = np.searchsorted(ends, bounds[:, 0], side="right")
    lasts = np.searchsorted(ends - lengths, bounds[:, 1], side="left")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        mask[first:last] = True
    return mask
