"""From token texts to one text, and from places in that text back to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from retrain.types import BoolArray

Span = tuple[int, int]
"""Start and end (exclusive) of some characters."""


def join_tokens(token_texts: Sequence[str]) -> str:
    """The completion as one text. Word-start and line-break markers become blanks, one character for one."""
    return "".join(token_texts).replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")


def mark_spans(token_texts: Sequence[str], spans: Iterable[Span]) -> BoolArray:
    """True on every token that shares a character with a span."""
    mask = np.zeros(len(token_texts), dtype=np.bool_)
    bounds = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    if len(bounds) == 0:
        return mask
    lengths = np.fromiter(map(len, token_texts), dtype=np.int64, count=len(token_texts))
    ends = np.cumsum(lengths)
    # The first token that ends after the span begins, up to the first that begins where the span has ended.
    firsts = np.searchsorted(ends, bounds[:, 0], side="right")
    lasts = np.searchsorted(ends - lengths, bounds[:, 1], side="left")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        mask[first:last] = True
    return mask
