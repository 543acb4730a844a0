"""Training rows of scored groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrain.advantages import Credit
from retrain.types import Datum, FloatArray, Group, Segment


def build_datums(
    groups: Sequence[Group],
    credit: Credit,
    all_groups: bool = False,
    known: Mapping[int, Sequence[Datum]] | None = None,
) -> list[Datum]:
    """Rows to train on: scored completions of groups with a signal.

    With a KL penalty, which applies to every completion, `all_groups` are trained on. `known` has the rows of groups
    that were built before, by the group's `id`; they get the number that the group has here.
    """
    excluded = set(credit.excluded)
    datums: list[Datum] = []
    for at in range(len(groups)) if all_groups else credit.live():
        built = known.get(id(groups[at])) if known else None
        if built is not None:
            datums += [replace(datum, group=at) for datum in built]
            continue
        for index, completion in enumerate(groups[at].completions_G):
            if (at, index) not in excluded and len(completion.token_ids_T):
                datums += rows_of(groups[at], at, index, credit.token_advantages_PG[at][index])
    return datums


def rows_of(group: Group, at: int, index: int, advantages_T: FloatArray) -> list[Datum]:
    """The training rows of one completion of group `at`."""
    completion = group.completions_G[index]
    mask_T = completion.sampled_T if completion.sampled_T is not None else np.ones(len(advantages_T), bool)
    datums = []
    for row in completion.segments or (Segment(group.prompt_ids, 0, len(advantages_T)),):
        part = slice(row.start, row.stop)
        ids_T, logprobs_T = completion.token_ids_T[part], completion.logprobs_T[part]
        datums.append(Datum(row.prompt_ids, ids_T, logprobs_T, advantages_T[part], mask_T[part], at, index))
    return datums
