"""Attention over a packed row in which the completions of a group may share one copy of their prompt.

A prompt lies in the row once; each of its completions attends to it and to itself. Norms, projections and MLPs then see
a prompt's tokens once a group instead of once a completion, and the gradients of all completions meet in its keys and
values: the numbers are those of whole sequences laid end to end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.modeling.attention import Scoring, causal_attention
from retrain.modeling.determinism import sum_by_row
from retrain.modeling.policy import Policy

# The largest head that flash attention's kernels take, in steps of eight.
_FLASH_HEAD = 256


@dataclass(frozen=True)
class Stretch:
    """Tokens `start` to `start + length` of the row, preceded in their sequence by an earlier stretch's tokens."""

    start: int
    length: int
    prefix_start: int = 0
    prefix: int = 0

    @property
    def seen(self) -> int:
        """Tokens that its last query sees."""
        return self.prefix + self.length


class SharedPrefixAttention:
    """Causal attention of each stretch on its prefix and itself. Stretches lie end to end, in order, and fill the row.

    Flash attention takes stretches of any lengths as they lie. Where it cannot be used, those with prefixes of one
    length are padded on the right to the longest of them for this one operation; a query never sees what is after it.
    """

    def __init__(self, stretches: Sequence[Stretch], device: torch.device) -> None:
        self.stretches = stretches
        self.device = device
        self.longest = max(stretch.seen for stretch in stretches)
        self.longest_query = max(stretch.length for stretch in stretches)
        self.spread = _Spread.plan(stretches, device) if any(stretch.prefix for stretch in stretches) else None
        self.ends_q, self.ends_k = (
            torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
            for lengths in ([s.length for s in stretches], [s.seen for s in stretches])
        )
        self._padding: _Padding | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention output of one layer; tensors are (1, heads, tokens, head size)."""
        if len(self.stretches) == 1:
            # One sequence needs no packing, and PyTorch then chooses among more kernels.
            return causal_attention(query, key, value, scoring)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.spread is not None:
            k, v = (_Spreading.apply(tensor, self.spread) for tensor in (k, v))  # type: ignore[no-untyped-call]
        output = self._flash(q, k, v, scoring) if can_flash(q, scoring) else self._padded(q, k, v, scoring)
        return output.transpose(0, 1).unsqueeze(0)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Queries are aligned with the end of their keys, which is what `is_causal` means to this operation."""
        window = -1 if scoring.window is None or scoring.window >= self.longest else scoring.window - 1
        output: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, self.ends_q, self.ends_k, self.longest_query, self.longest, 0.0, True, False,
            scale=scoring.scale, window_size_left=window, window_size_right=0,
        )[0]  # fmt: skip
        return output

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self._padding = self._padding or _Padding.plan(self.stretches, self.device)
        outputs = [rows.attend(query, key, value, scoring) for rows in self._padding.rows]
        return torch.cat(outputs).index_select(0, self._padding.cells)


def can_flash(query: Tensor, scoring: Scoring) -> bool:
    """Whether flash attention takes these queries (tokens, heads, head size)."""
    size = query.shape[2]
    return scoring.softcap is None and size <= _FLASH_HEAD and size % 8 == 0 and _has_flash(query.device, query.dtype)


def takes_uneven_lengths(policy: Policy) -> bool:
    """Whether a model's sequences are attended to as they lie, so that padding need not be reckoned with."""
    told = policy.causal_lm.config.get_text_config().to_dict()
    by_us = not policy.own_attention and not told.get("attn_logit_softcapping")
    return by_us and _has_flash(policy.device, policy.dtype)


@functools.cache
def _has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Flash attention is built for Ampere and newer, and for 16-bit numbers."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@dataclass(frozen=True)
class _Rows:
    """Stretches with prefixes of one length, as the rows of a table."""

    count: int
    prefix: int
    queries: Tensor
    """The token of the row in each cell; padding repeats the first."""
    keys: Tensor
    """The spread key in each cell."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Outputs of all cells, end to end."""
        q, k, v = (
            flat.index_select(0, cells).reshape(self.count, -1, *flat.shape[1:]).transpose(1, 2)
            for flat, cells in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        return causal_attention(q, k, v, scoring, self.prefix).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Padding:
    """The stretches as tables, and the cell of each token of the row in all of them."""

    rows: list[_Rows]
    cells: Tensor

    @classmethod
    def plan(cls, stretches: Sequence[Stretch], device: torch.device) -> _Padding:
        keys_at = np.cumsum([0, *(s.seen for s in stretches[:-1])])
        rows, cells, cell = [], np.empty(sum(s.length for s in stretches), np.int64), 0
        for prefix in sorted({s.prefix for s in stretches}):
            alike = [(s, at) for s, at in zip(stretches, keys_at, strict=True) if s.prefix == prefix]
            longest = max(s.length for s, _ in alike)
            queries = np.zeros((len(alike), longest), np.int64)
            keys = np.zeros((len(alike), prefix + longest), np.int64)
            for row, (s, at) in enumerate(alike):
                columns = np.arange(s.length)
                queries[row, : s.length] = s.start + columns
                keys[row, : s.seen] = at + np.arange(s.seen)
                cells[s.start + columns] = cell + row * longest + columns
            cell += queries.size
            on_device = [torch.as_tensor(part.ravel()).to(device) for part in (queries, keys)]
            rows.append(_Rows(len(alike), prefix, on_device[0], on_device[1]))
        return cls(rows, torch.as_tensor(cells).to(device))


@dataclass(frozen=True)
class _Spread:
    """How a row's keys become those of every stretch, its prefix before it."""

    index: Tensor
    """For each spread key, its token in the row."""
    own: Tensor
    """For each token of the row, its key in its own stretch."""
    copies: Tensor
    """Spread keys that are copies in a prefix."""
    copied: Tensor
    """The token of the row that each of them copies."""
    until: int
    """Tokens after this one have no copies; prompts that are shared should lie first in the row."""

    @classmethod
    def plan(cls, stretches: Sequence[Stretch], device: torch.device) -> _Spread:
        index, is_copy = [], []
        for s in stretches:
            index += [np.arange(s.prefix_start, s.prefix_start + s.prefix), np.arange(s.start, s.start + s.length)]
            is_copy += [np.ones(s.prefix, bool), np.zeros(s.length, bool)]
        tokens, copy = np.concatenate(index), np.concatenate(is_copy)
        parts = (tokens, (~copy).nonzero()[0], copy.nonzero()[0], tokens[copy])
        on_device = [torch.as_tensor(part).to(device) for part in parts]
        return cls(on_device[0], on_device[1], on_device[2], on_device[3], int(parts[3].max()) + 1)


class _Spreading(torch.autograd.Function):
    """Keys or values of a row, copied to every stretch that sees them; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, spread: _Spread) -> Tensor:
        """(tokens, heads, size) to (spread keys, heads, size)."""
        ctx.spread = spread
        return row.index_select(0, spread.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """A token's own gradient, and those of its copies."""
        spread: _Spread = ctx.spread
        own = gradient.index_select(0, spread.own)
        copies = gradient.index_select(0, spread.copies).float().flatten(1)
        sums = sum_by_row(copies, spread.copied, spread.until).view(-1, *own.shape[1:])
        own[: spread.until] = sums.add_(own[: spread.until]).to(own.dtype)
        return own, None
