"""Datums into micro-batches: sequences laid end to end, so that no padding is ever computed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.attention import PackedAttention
from retrain.backends.local.logprobs import History
from retrain.types import Datum


@dataclass(frozen=True)
class MicroBatch:
    """Several datums in one row of tokens, and where their completion tokens are predicted."""

    token_ids: Tensor
    positions: Tensor
    attend: PackedAttention
    predicting: Tensor
    """Index of the hidden state that predicts each completion token."""
    targets: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    row: Tensor
    rows: int
    history: History | None


def split_by_tokens(datums: Sequence[Datum], most: int) -> list[list[Datum]]:
    """Batches of similar lengths, at most `most` tokens each with attention's padding; a longer datum stands alone.

    As few batches as that allows, and as even as can be: a small last one would cost nearly as much as a full one.
    """
    ordered = sorted(datums, key=length_of, reverse=True)
    fewest = len(_fill(ordered, most))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(ordered, middle)) <= fewest else (middle + 1, high)
    return _fill(ordered, high)


def _fill(ordered: Sequence[Datum], most: int) -> list[list[Datum]]:
    """Put datums, longest first, into batches until the next would exceed `most`."""
    batches: list[list[Datum]] = []
    for datum in ordered:
        if not batches or length_of(batches[-1][0]) * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(datum)
    return batches


def length_of(datum: Datum) -> int:
    """Tokens of prompt and completion."""
    return len(datum.prompt_ids) + len(datum.completion_ids_T)


def pack(datums: Sequence[Datum], device: torch.device, with_history: bool) -> MicroBatch:
    """Lay datums end to end. The last token predicts nothing, so it is not fed to the model."""
    sequences = [np.concatenate([d.prompt_ids, d.completion_ids_T]) for d in datums]
    lengths = [len(sequence) - 1 for sequence in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    predicting = [
        start + len(d.prompt_ids) - 1 + np.arange(len(d.completion_ids_T))
        for start, d in zip(starts, datums, strict=True)
    ]

    def joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate(parts), dtype=dtype).to(device)

    history = None
    if with_history:
        history = History([torch.as_tensor(s, device=device) for s in sequences], [len(d.prompt_ids) for d in datums])
    return MicroBatch(
        token_ids=joined([s[:-1] for s in sequences], torch.long)[None],
        positions=joined([np.arange(n) for n in lengths], torch.long)[None],
        attend=PackedAttention(lengths, device),
        predicting=joined(predicting, torch.long),
        targets=joined([d.completion_ids_T for d in datums], torch.long),
        sampled_logprobs=joined([d.logprobs_T for d in datums], torch.float32),
        advantages=joined([d.advantages_T for d in datums], torch.float32),
        mask=joined([d.mask_T for d in datums], torch.float32),
        row=joined([np.full(len(d.completion_ids_T), i) for i, d in enumerate(datums)], torch.long),
        rows=len(datums),
        history=history,
    )
