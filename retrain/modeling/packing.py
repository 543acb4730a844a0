"""Datums into micro-batches: sequences laid end to end, so that no padding is ever computed on.

Completions of one prompt stay together where they can; their prompt then lies in the row once for all of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.modeling.attention import Attention, PackedAttention
from retrain.modeling.determinism import gather_rows
from retrain.modeling.logprobs import History, token_logprobs
from retrain.modeling.policy import Policy
from retrain.modeling.prefix import SharedPrefixAttention, Stretch
from retrain.types import Datum, IntArray, Sampling

# Share of a micro-batch's tokens that one copy of each prompt must save to be worth the copying of its keys.
WORTH_SHARING = 0.02


@dataclass(frozen=True)
class MicroBatch:
    """Several datums in one row of tokens, and where their completion tokens are predicted."""

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
class Load:
    """How much a micro-batch holds."""

    rows: int
    longest: int
    tokens: int
    repeated: int
    """Tokens of prompts that stand in it once already."""

    @classmethod
    def of(cls, group: Sequence[Datum]) -> Load:
        """That of completions of one prompt."""
        lengths = [length_of(datum) for datum in group]
        return cls(len(group), max(lengths), sum(lengths), len(group[0].prompt_ids) * (len(group) - 1))

    def __add__(self, other: Load) -> Load:
        return Load(
            self.rows + other.rows,
            max(self.longest, other.longest),
            self.tokens + other.tokens,
            self.repeated + other.repeated,
        )

    @property
    def saved(self) -> int:
        """Tokens that sharing prompts spares; 0 where that is not worth it, and prompts are then not shared."""
        return self.repeated if self.repeated >= WORTH_SHARING * self.tokens else 0

    def fed(self) -> int:
        """Tokens that the forward pass sees."""
        return self.tokens - self.saved

    def padded(self) -> int:
        """Tokens where attention pads every sequence to the longest."""
        return self.rows * self.longest


Cost = Callable[[Load], int]


def split_by_tokens(
    datums: Sequence[Datum], most: int, cost: Cost = Load.padded, most_rows: int = 0
) -> list[list[Datum]]:
    """Batches that cost at most `most` tokens, completions of one prompt together; a datum that costs more is alone.

    As few batches as that allows, and as even as can be: a small last one would cost nearly as much as a full one.
    """
    if most_rows:
        cost = _limited(cost, most_rows, most + 1)
    groups = [sorted(group, key=length_of, reverse=True) for group in by_prompt(datums)]
    groups.sort(key=lambda group: length_of(group[0]), reverse=True)
    fewest = len(_fill(groups, most, cost))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(groups, middle, cost)) <= fewest else (middle + 1, high)
    return _fill(groups, high, cost)


def _limited(cost: Cost, most_rows: int, too_much: int) -> Cost:
    return lambda load: too_much if load.rows > most_rows else cost(load)


def _fill(groups: Sequence[Sequence[Datum]], most: int, cost: Cost) -> list[list[Datum]]:
    """Put groups into batches until the next would exceed `most`; only a group that is too large itself is cut."""
    batches: list[list[Datum]] = []
    load: Load | None = None
    for group in groups:
        for piece in [group] if cost(Load.of(group)) <= most else _cut(group, most, cost):
            both = Load.of(piece) + load if load is not None else None
            if both is not None and cost(both) <= most:
                batches[-1] += piece
                load = both
            else:
                batches.append(list(piece))
                load = Load.of(piece)
    return batches


def _cut(group: Sequence[Datum], most: int, cost: Cost) -> list[Sequence[Datum]]:
    """A group in pieces, longest completions first."""
    pieces: list[Sequence[Datum]] = []
    start = 0
    for stop in range(1, len(group) + 1):
        if stop == len(group) or cost(Load.of(group[start : stop + 1])) > most:
            pieces.append(group[start:stop])
            start = stop
    return pieces


def by_prompt(datums: Sequence[Datum]) -> list[list[Datum]]:
    """Datums that share a prompt, in the order in which prompts first come."""
    groups: dict[bytes, list[Datum]] = {}
    for datum in datums:
        groups.setdefault(_prompt_key(datum), []).append(datum)
    return list(groups.values())


def _prompt_key(datum: Datum) -> bytes:
    return np.asarray(datum.prompt_ids, dtype=np.int64).tobytes()


def length_of(datum: Datum) -> int:
    """Tokens of prompt and completion."""
    return len(datum.prompt_ids) + len(datum.completion_ids_T)


def pack(datums: Sequence[Datum], device: torch.device, with_history: bool, share: bool = True) -> MicroBatch:
    """Lay datums end to end. The last token predicts nothing, so it is not fed to the model.

    Without `share` every sequence is whole, which is all that a model with an attention of its own understands.
    """
    layout = _lay_out(datums, share)
    lengths = [stretch.length for stretch in layout.stretches]

    def joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate(parts), dtype=dtype).to(device)

    history = None
    if with_history:
        sequences = [torch.as_tensor(_sequence(datum), device=device) for datum in datums]
        history = History(sequences, [len(d.prompt_ids) for d in datums])
    return MicroBatch(
        token_ids=joined(layout.token_ids, torch.long)[None],
        positions=joined(layout.positions, torch.long)[None],
        attend=SharedPrefixAttention(layout.stretches, device) if share else PackedAttention(lengths, device),
        predicting=joined(layout.predicting, torch.long),
        targets=joined([d.completion_ids_T for d in datums], torch.long),
        sampled_logprobs=joined([d.logprobs_T for d in datums], torch.float32),
        advantages=joined([d.advantages_T for d in datums], torch.float32),
        mask=joined([d.mask_T for d in datums], torch.float32),
        row=joined([np.full(len(d.completion_ids_T), i) for i, d in enumerate(datums)], torch.long),
        rows=len(datums),
        history=history,
    )


class _Layout:
    """The row of a micro-batch as it is filled: tokens, their positions, and who attends to what."""

    def __init__(self) -> None:
        self.token_ids: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.stretches: list[Stretch] = []
        self.predicting: list[IntArray] = []
        """For each datum, the tokens of the row that predict its completion."""
        self.tokens = 0

    def add(self, tokens: IntArray, before: Stretch | None = None) -> Stretch:
        """Append tokens that follow an earlier stretch, or none."""
        prefix = before.length if before is not None else 0
        stretch = Stretch(self.tokens, len(tokens), before.start if before is not None else 0, prefix)
        # The prompt's last token may predict all there is of a completion; then there is nothing to lay down.
        if len(tokens):
            self.token_ids.append(tokens)
            self.positions.append(prefix + np.arange(len(tokens)))
            self.stretches.append(stretch)
            self.tokens += len(tokens)
        return stretch


def _lay_out(datums: Sequence[Datum], share: bool) -> _Layout:
    """Shared prompts first, then everything else, in the order of the datums."""
    layout, prompts, groups = _Layout(), dict[bytes, Stretch](), by_prompt(datums)
    if share and functools.reduce(operator.add, map(Load.of, groups)).saved:
        for group in groups:
            if len(group) > 1:
                prompts[_prompt_key(group[0])] = layout.add(np.asarray(group[0].prompt_ids))
    for datum in datums:
        length, targets = len(datum.prompt_ids), np.arange(len(datum.completion_ids_T))
        prompt_stretch = prompts.get(_prompt_key(datum))
        if prompt_stretch is None:
            whole = layout.add(_sequence(datum)[:-1])
            layout.predicting.append(whole.start + length - 1 + targets)
        else:
            own = layout.add(np.asarray(datum.completion_ids_T[:-1]), before=prompt_stretch)
            last = prompt_stretch.start + length - 1
            layout.predicting.append(np.where(targets == 0, last, own.start + targets - 1))
    return layout


def _sequence(datum: Datum) -> IntArray:
    return np.concatenate([datum.prompt_ids, datum.completion_ids_T])


def packed_logprobs(policy: Policy, packed: MicroBatch, sampling: Sampling) -> Tensor:
    """Log-probs of a micro-batch's completion tokens under a policy as it is now."""
    return token_logprobs(policy, predicting_states(policy, packed), packed.targets, sampling, packed.history)


def predicting_states(policy: Policy, packed: MicroBatch) -> Tensor:
    """The hidden state before each completion token of a micro-batch."""
    hidden = policy.hidden(packed.token_ids, packed.positions, packed.attend)[0]
    # The first tokens of a group's completions are all predicted by one state, the last of their shared prompt.
    return gather_rows(hidden, packed.predicting)
