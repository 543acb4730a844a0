"""Splits prompts and datums over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from retrain.modeling.packing import by_prompt, length_of
from retrain.types import Datum


def split_prompts(prompts: int, ranks: int) -> list[slice]:
    """Contiguous slices of prompts, as even as possible, so that results need no sorting."""
    edges = [rank * prompts // ranks for rank in range(ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def balance_datums(datums: Sequence[Datum], ranks: int) -> list[list[Datum]]:
    """Datums balanced by tokens: the longest group goes to the least loaded rank, completions of one prompt together.

    A group that exceeds an even share by itself is cut, since the other ranks would wait for it.
    """
    even = sum(map(length_of, datums)) / ranks
    pieces: list[list[Datum]] = []
    for group in by_prompt(datums):
        parts = min(len(group), max(1, round(sum(map(length_of, group)) / even)))
        pieces += [group[part::parts] for part in range(parts)]
    pieces.sort(key=lambda piece: sum(map(length_of, piece)), reverse=True)
    held: list[list[Datum]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in pieces:
        least = loads.index(min(loads))
        held[least] += piece
        loads[least] += sum(map(length_of, piece))
    return held
