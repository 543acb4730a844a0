"""Who does what: prompts and datums divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from retrain.modeling.packing import by_prompt, length_of
from retrain.types import Datum


def share_prompts(prompts: int, ranks: int) -> list[slice]:
    """Prompts in order, as evenly as can be: each rank has a stretch of them, so that answers need no sorting."""
    edges = [rank * prompts // ranks for rank in range(ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def share_datums(datums: Sequence[Datum], ranks: int) -> list[list[Datum]]:
    """Datums by tokens: the longest group goes to whoever has least, completions of one prompt together.

    A group that alone exceeds a rank's even share is cut, since the others would wait for it.
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
