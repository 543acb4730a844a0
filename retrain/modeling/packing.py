"""Packs datums into micro-batches without padding.

Completions of one prompt stay together where possible and share one copy of it.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.modeling.attention import Attention, PackedAttention, handle_of
from retrain.modeling.determinism import gather_rows
from retrain.modeling.logprobs import History, token_logprobs
from retrain.modeling.policy import Policy
from retrain.modeling.prefix import SharedPrefixAttention, TokenSpan, takes_uneven_lengths
from retrain.types import Datum, FloatArray, IntArray, Sampling

# Minimum share of a micro-batch's tokens that prompt sharing must save to be worth copying keys, and doing without
# cuDNN's attention.
MIN_SHARED = 0.05


@dataclass(frozen=True)
class MicroBatch:
    """Several datums packed into one row of tokens."""

    token_ids: Tensor
    positions: Tensor
    attend: Attention
    predicting: Tensor
    """Index of the hidden state that predicts each completion token."""
    targets: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    row: Tensor
    rows: int
    history: History | None


@dataclass(frozen=True)
class BatchLoad:
    """Size of a micro-batch."""

    rows: int
    longest: int
    tokens: int
    repeated: int
    """Tokens of repeated prompts."""

    @classmethod
    def of(cls, group: Sequence[Datum]) -> BatchLoad:
        """Load of the completions of one prompt."""
        lengths = [length_of(datum) for datum in group]
        return cls(len(group), max(lengths), sum(lengths), len(group[0].prompt_ids) * (len(group) - 1))

    def __add__(self, other: BatchLoad) -> BatchLoad:
        return BatchLoad(
            self.rows + other.rows,
            max(self.longest, other.longest),
            self.tokens + other.tokens,
            self.repeated + other.repeated,
        )

    @property
    def saved(self) -> int:
        """Tokens saved by sharing prompts; 0 where that is not worthwhile, and prompts are not shared."""
        return self.repeated if self.repeated >= MIN_SHARED * self.tokens else 0

    def fed(self) -> int:
        """Tokens of the forward pass."""
        return self.tokens - self.saved

    def padded(self) -> int:
        """Tokens if attention pads every sequence to the longest."""
        return self.rows * self.longest


Cost = Callable[[BatchLoad], int]


def split_by_tokens(
    datums: Sequence[Datum], most: int, cost: Cost = BatchLoad.padded, most_rows: int = 0
) -> list[list[Datum]]:
    """Batches of at most `most` tokens; a longer datum gets its own batch.

    Completions of one prompt stay together where they share it. Batches are as few and as even as possible: a small
    last one costs nearly as much as a full one.
    """
    if most_rows:
        cost = _limited(cost, most_rows, most + 1)
    groups = [piece for group in by_prompt(datums) for piece in _kept_together(group)]
    fewest = len(_fill(groups, most, cost))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(groups, middle, cost)) <= fewest else (middle + 1, high)
    return _fill(groups, high, cost)


def _kept_together(group: Sequence[Datum]) -> list[list[Datum]]:
    """The completions of a prompt, longest first; one by one where sharing the prompt is not worthwhile."""
    longest_first = sorted(group, key=length_of, reverse=True)
    return [longest_first] if BatchLoad.of(group).saved else [[datum] for datum in longest_first]


def _limited(cost: Cost, most_rows: int, too_much: int) -> Cost:
    return lambda load: too_much if load.rows > most_rows else cost(load)


def _fill(groups: Sequence[Sequence[Datum]], most: int, cost: Cost) -> list[list[Datum]]:
    """Fill batches up to `most`, each with the largest pieces that fit; only groups that exceed it are cut."""
    pieces = [piece for group in groups for piece in _cut(group, most, cost)]
    left = sorted(((BatchLoad.of(piece), piece) for piece in pieces), key=lambda one: cost(one[0]))
    batches: list[list[Datum]] = []
    while left:
        load, first = left.pop()
        batches.append(list(first))
        while left:
            at = _count_fitting(left, load, most, cost)
            if not at:
                break
            added, piece = left.pop(at - 1)
            load += added
            batches[-1] += piece
    return batches


def _count_fitting(left: Sequence[tuple[BatchLoad, Sequence[Datum]]], load: BatchLoad, most: int, cost: Cost) -> int:
    """How many of the pieces, smallest first, fit beside a load by themselves. Usually all do."""

    def together(one: tuple[BatchLoad, Sequence[Datum]]) -> int:
        return cost(load + one[0])

    return len(left) if together(left[-1]) <= most else bisect_right(left, most, key=together)


def _cut(group: Sequence[Datum], most: int, cost: Cost) -> list[Sequence[Datum]]:
    """Split a group, longest completions first, if it exceeds `most`."""
    pieces: list[Sequence[Datum]] = []
    start = 0
    for stop in range(1, len(group) + 1):
        if stop == len(group) or cost(BatchLoad.of(group[start : stop + 1])) > most:
            pieces.append(group[start:stop])
            start = stop
    return pieces


def by_prompt(datums: Sequence[Datum]) -> list[list[Datum]]:
    """Datums grouped by prompt, in order of first occurrence."""
    groups: dict[bytes, list[Datum]] = {}
    for datum in datums:
        groups.setdefault(_prompt_key(datum), []).append(datum)
    return list(groups.values())


def _prompt_key(datum: Datum) -> bytes:
    return np.asarray(datum.prompt_ids, dtype=np.int64).tobytes()


def length_of(datum: Datum) -> int:
    """Tokens of prompt and completion."""
    return len(datum.prompt_ids) + len(datum.completion_ids_T)


def pack(
    datums: Sequence[Datum], device: torch.device, with_history: bool, share: bool = True, is_deterministic: bool = True
) -> MicroBatch:
    """Pack datums into one row. The last token of a sequence predicts nothing and is not fed to the model.

    Without `share` every sequence is complete, as models with their own attention require. `is_deterministic` is that
    of the attention.
    """
    layout = lay_out(datums, share)
    attend: Attention
    if share:
        attend = SharedPrefixAttention(layout.spans, device, is_deterministic)
    else:
        attend = PackedAttention([span.length for span in layout.spans], device)

    def joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate(parts), dtype=dtype).to(device)

    history = None
    if with_history:
        sequences = [torch.as_tensor(_sequence(datum), device=device) for datum in datums]
        history = History(sequences, [len(d.prompt_ids) for d in datums])
    return MicroBatch(
        token_ids=joined(layout.token_ids, torch.long)[None],
        positions=joined(layout.positions, torch.long)[None],
        attend=attend,
        predicting=joined(layout.predicting, torch.long),
        targets=joined([d.completion_ids_T for d in datums], torch.long),
        sampled_logprobs=joined([d.logprobs_T for d in datums], torch.float32),
        advantages=joined([d.advantages_T for d in datums], torch.float32),
        mask=joined([d.mask_T for d in datums], torch.float32),
        row=joined([np.full(len(d.completion_ids_T), i) for i, d in enumerate(datums)], torch.long),
        rows=len(datums),
        history=history,
    )


class Layout:
    """The row of a micro-batch under construction."""

    def __init__(self) -> None:
        self.token_ids: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.spans: list[TokenSpan] = []
        self.predicting: list[IntArray] = []
        """For each datum, indices of the row that predict its completion."""
        self.tokens = 0

    def add(self, tokens: IntArray, before: TokenSpan | None = None) -> TokenSpan:
        """Append tokens, after an optional prefix span."""
        prefix = before.length if before is not None else 0
        span = TokenSpan(self.tokens, len(tokens), before.start if before is not None else 0, prefix)
        # A one-token completion is predicted by the prompt's last token and adds none.
        if len(tokens):
            self.token_ids.append(tokens)
            self.positions.append(prefix + np.arange(len(tokens)))
            self.spans.append(span)
            self.tokens += len(tokens)
        return span


def lay_out(datums: Sequence[Datum], share: bool) -> Layout:
    """Shared prompts first, then the rest in the order of the datums."""
    layout, prompts, groups = Layout(), dict[bytes, TokenSpan](), by_prompt(datums)
    if share and functools.reduce(operator.add, map(BatchLoad.of, groups)).saved:
        for group in groups:
            if len(group) > 1:
                prompts[_prompt_key(group[0])] = layout.add(np.asarray(group[0].prompt_ids))
    for datum in datums:
        length, targets = len(datum.prompt_ids), np.arange(len(datum.completion_ids_T))
        prompt_span = prompts.get(_prompt_key(datum))
        if prompt_span is None:
            sequence = layout.add(_sequence(datum)[:-1])
            layout.predicting.append(sequence.start + length - 1 + targets)
        else:
            own = layout.add(np.asarray(datum.completion_ids_T[:-1]), before=prompt_span)
            last = prompt_span.start + length - 1
            layout.predicting.append(np.where(targets == 0, last, own.start + targets - 1))
    return layout


def _sequence(datum: Datum) -> IntArray:
    return np.concatenate([datum.prompt_ids, datum.completion_ids_T])


def split_rows(values: Tensor, lengths: Sequence[int]) -> list[FloatArray]:
    """Per-row arrays of a flat tensor with one value per completion token."""
    return np.split(values.float().cpu().numpy(), np.cumsum(lengths)[:-1])


def packed_logprobs(policy: Policy, packed: MicroBatch, sampling: Sampling) -> Tensor:
    """Log-probs of a micro-batch's completion tokens under the current policy."""
    return token_logprobs(policy, predicting_states(policy, packed), packed.targets, sampling, packed.history)


def predicting_states(policy: Policy, packed: MicroBatch) -> Tensor:
    """The hidden state before each completion token of a micro-batch."""
    attend: Attention | Tensor = packed.attend
    if isinstance(attend, SharedPrefixAttention) and takes_uneven_lengths(policy):
        attend = handle_of(attend)
    hidden = policy.hidden(packed.token_ids, packed.positions, attend)[0]
    # One state, the last of a shared prompt, predicts the first token of all its completions.
    return gather_rows(hidden, packed.predicting)
