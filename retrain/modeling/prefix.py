"""Attention over a packed row in which completions of a group share one copy of their prompt.

A prompt is in the row once; each of its completions attends to it and to itself. Norms, projections and MLPs process a
prompt once per group instead of once per completion, and the gradients of all completions accumulate in its keys and
values. Results equal those of complete sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.modeling.attention import Scoring, attend_packed, causal_attention, handle_of
from retrain.modeling.determinism import sum_by_row
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import CudnnAttention, FlashAttention, any_order, has_cudnn_attention

# Largest head size of flash attention; sizes are multiples of 8.
_MAX_FLASH_HEAD = 256
_MAX_CUDNN_HEAD = 128
# Length at which cuDNN's attention becomes faster (H200: twice as fast at 9,000 tokens), and the step to which lengths
# are rounded up for it.
LONG = 2048
LENGTH_STEP = 512
HUGE = 1e30


@dataclass(frozen=True)
class TokenSpan:
    """Tokens `start` to `start + length` of the row, with an earlier span as prefix."""

    start: int
    length: int
    prefix_start: int = 0
    prefix: int = 0

    @property
    def seen(self) -> int:
        """Tokens visible to its last query."""
        return self.prefix + self.length


class SharedPrefixAttention:
    """Causal attention of each span over its prefix and itself. Spans are contiguous and fill the row.

    On a GPU, flash attention takes spans of any length; for long ones, cuDNN's is faster. Elsewhere, spans with
    prefixes of equal length are padded on the right for this operation.
    """

    def __init__(self, spans: Sequence[TokenSpan], device: torch.device, is_deterministic: bool = True) -> None:
        self.spans = spans
        self.device = device
        self.is_deterministic = is_deterministic
        """Whether PyTorch's setting applies; a backward pass is faster without."""
        self.prefix_index = _PrefixIndex.plan(spans, device) if any(span.prefix for span in spans) else None
        self.queries = _Sequences.of([span.length for span in spans], device)
        self.keys = _Sequences.of([span.seen for span in spans], device)
        has_runs = self.prefix_index is None and self.keys.longest >= LONG
        self.runs = [_Run.of(run, device) for run in _long_spans_apart(spans)] if has_runs else []
        """The same spans, long ones apart; empty where none is long, or some have a prefix."""
        self._padding: _Padding | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention output of one layer; tensors are (1, heads, tokens, head size)."""
        if can_flash(query, scoring):
            output: Tensor = attend_packed(query, key, value, handle_of(self), scoring.scale, scoring.window)[0]
            return output.transpose(1, 2)
        if len(self.spans) == 1:
            return causal_attention(query, key, value, scoring)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.prefix_index is not None:
            k, v = (GatherPrefix.apply(tensor, self.prefix_index) for tensor in (k, v))  # type: ignore[no-untyped-call]
        return self._padded(q, k, v, scoring).transpose(0, 1).unsqueeze(0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Attention output of one layer on a GPU, and the log-sum-exp of its scores."""
        with self._order():
            if self._uses_cudnn(query, scoring):
                outputs, sums = zip(*(run.forward(query, key, value, scoring) for run in self.runs), strict=True)
                return torch.cat(outputs), torch.cat(sums, 1)
            return self._flash(scoring).forward(query, *self._gathered(key, value))

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Its gradients."""
        with self._order():
            if self._uses_cudnn(query, scoring):
                parts = (run.backward(gradient, query, key, value, output, logsumexp, scoring) for run in self.runs)
                dq, dk, dv = map(torch.cat, zip(*parts, strict=True))
                return dq, dk, dv
            gathered = self._gathered(key, value)
            dq, dk, dv = self._flash(scoring).backward(gradient, query, *gathered, output, logsumexp)
        if self.prefix_index is not None:
            dk, dv = self.prefix_index.summed(dk), self.prefix_index.summed(dv)
        return dq, dk, dv

    def _order(self) -> AbstractContextManager[None]:
        # Only here: compiled layers depend on PyTorch's setting, and would be compiled once more.
        return nullcontext() if self.is_deterministic else any_order()

    def _uses_cudnn(self, query: Tensor, scoring: Scoring) -> bool:
        return bool(self.runs) and can_use_cudnn(query, scoring)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.prefix_index is None:
            return key, value
        return key.index_select(0, self.prefix_index.index), value.index_select(0, self.prefix_index.index)

    def _flash(self, scoring: Scoring) -> FlashAttention:
        longest = self.queries.longest, self.keys.longest
        window = -1 if scoring.window is None or scoring.window >= longest[1] else scoring.window - 1
        return FlashAttention((self.queries.ends, self.keys.ends), longest, scoring.scale, window)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self._padding = self._padding or _Padding.plan(self.spans, self.device)
        outputs = [rows.attend(query, key, value, scoring) for rows in self._padding.rows]
        return torch.cat(outputs).index_select(0, self._padding.cells)


@dataclass(frozen=True)
class _Sequences:
    """Sequences of a packed row: where each ends, after a 0, and the longest."""

    ends: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> _Sequences:
        return cls(torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device), max(lengths))


@dataclass(frozen=True)
class _Run:
    """A long span by itself, or consecutive shorter ones, without prefixes."""

    start: int
    sequences: _Sequences
    tokens: int

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> _Run:
        lengths = [span.length for span in spans]
        return cls(spans[0].start, _Sequences.of(lengths, device), sum(lengths))

    @property
    def is_long(self) -> bool:
        return self.sequences.longest >= LONG

    @property
    def padded(self) -> int:
        """Tokens passed to cuDNN, rounded up, since it plans a kernel for each length, which takes 0.1 s."""
        return self.tokens + -self.tokens % LENGTH_STEP

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of these spans, from tensors of the whole row."""
        if not self.is_long:
            return self._flash(scoring).forward(*map(self._own, (query, key, value)))
        output, logsumexp = CudnnAttention(scoring.scale).forward(*map(self._with_padding, (query, key, value)))
        return output[: self.tokens], logsumexp[:, : self.tokens]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Their gradients."""
        own, sums = self._own(gradient), logsumexp[:, self.start : self.start + self.tokens]
        if not self.is_long:
            q, k, v, out = map(self._own, (query, key, value, output))
            return self._flash(scoring).backward(own, q, k, v, out, sums.contiguous())
        # Tokens of the padding have no gradient. With this log-sum-exp their weights are 0 and do not overflow.
        own = F.pad(own, (0, 0, 0, 0, 0, self.padded - self.tokens))
        sums = F.pad(sums, (0, self.padded - self.tokens), value=HUGE)
        q, k, v, out = map(self._with_padding, (query, key, value, output))
        dq, dk, dv = CudnnAttention(scoring.scale).backward(own, q, k, v, out, sums)
        return dq[: self.tokens], dk[: self.tokens], dv[: self.tokens]

    def _flash(self, scoring: Scoring) -> FlashAttention:
        ends, longest = self.sequences.ends, self.sequences.longest
        return FlashAttention((ends, ends), (longest, longest), scoring.scale, -1)

    def _own(self, row: Tensor) -> Tensor:
        return row[self.start : self.start + self.tokens]

    def _with_padding(self, row: Tensor) -> Tensor:
        """Causal attention does not see what follows, so the padding is the next tokens of the row."""
        part = row[self.start : self.start + self.padded]
        return F.pad(part, (0, 0, 0, 0, 0, self.padded - len(part))) if len(part) < self.padded else part


def _long_spans_apart(spans: Sequence[TokenSpan]) -> list[list[TokenSpan]]:
    runs: list[list[TokenSpan]] = []
    for span in spans:
        if not runs or max(span.length, runs[-1][-1].length) >= LONG:
            runs.append([])
        runs[-1].append(span)
    return runs


def can_flash(query: Tensor, scoring: Scoring) -> bool:
    """Whether flash attention supports these queries (..., head size)."""
    return scoring.softcap is None and _fits_flash(query.shape[-1]) and _has_flash(query.device, query.dtype)


def can_use_cudnn(query: Tensor, scoring: Scoring) -> bool:
    """Whether PyTorch uses cuDNN's attention for these queries. Its backward pass is not deterministic."""
    return (
        scoring.window is None
        and query.shape[-1] <= _MAX_CUDNN_HEAD
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and not torch.are_deterministic_algorithms_enabled()
        and has_cudnn_attention()
    )


def takes_uneven_lengths(policy: Policy) -> bool:
    """Whether attention runs without padding for this model."""
    uses_ours = not policy.attention_fallback_reason and policy.attention_cap is None
    return uses_ours and _fits_flash(policy.head_size) and _has_flash(policy.device, policy.dtype)


def _fits_flash(size: int) -> bool:
    return size <= _MAX_FLASH_HEAD and size % 8 == 0


@functools.cache
def _has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Flash attention needs Ampere or newer, and 16-bit floats."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@dataclass(frozen=True)
class _Rows:
    """Spans with prefixes of equal length, as padded rows."""

    count: int
    prefix: int
    queries: Tensor
    """Index of the token in each cell; padding repeats the first."""
    keys: Tensor
    """Index of the gathered key in each cell."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Outputs of all cells, flattened."""
        q, k, v = (
            flat.index_select(0, cells).reshape(self.count, -1, *flat.shape[1:]).transpose(1, 2)
            for flat, cells in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        return causal_attention(q, k, v, scoring, self.prefix).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Padding:
    """All spans as padded rows, and the cell of each token."""

    rows: list[_Rows]
    cells: Tensor

    @classmethod
    def plan(cls, spans: Sequence[TokenSpan], device: torch.device) -> _Padding:
        keys_at = np.cumsum([0, *(s.seen for s in spans[:-1])])
        rows, cells, cell = [], np.empty(sum(s.length for s in spans), np.int64), 0
        for prefix in sorted({s.prefix for s in spans}):
            alike = [(s, at) for s, at in zip(spans, keys_at, strict=True) if s.prefix == prefix]
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
class _PrefixIndex:
    """Indices that gather a row's keys for every span, prefix first."""

    index: Tensor
    """For each gathered key, its token in the row."""
    own: Tensor
    """For each token of the row, its key in its own span."""
    copies: Tensor
    """Gathered keys that are copies of prompt tokens."""
    copied: Tensor
    """Source token of each copy."""
    until: int
    """Tokens from here on have no copies; shared prompts come first in the row."""

    @classmethod
    def plan(cls, spans: Sequence[TokenSpan], device: torch.device) -> _PrefixIndex:
        index, is_copy = [], []
        for s in spans:
            index += [np.arange(s.prefix_start, s.prefix_start + s.prefix), np.arange(s.start, s.start + s.length)]
            is_copy += [np.ones(s.prefix, bool), np.zeros(s.length, bool)]
        tokens, copy = np.concatenate(index), np.concatenate(is_copy)
        parts = (tokens, (~copy).nonzero()[0], copy.nonzero()[0], tokens[copy])
        on_device = [torch.as_tensor(part).to(device) for part in parts]
        return cls(on_device[0], on_device[1], on_device[2], on_device[3], int(parts[3].max()) + 1)

    def summed(self, gathered: Tensor) -> Tensor:
        """For each token of the row, the sum of its own gathered value and those of its copies, in float32."""
        own = gathered.index_select(0, self.own)
        copies = gathered.index_select(0, self.copies).float().flatten(1)
        sums = sum_by_row(copies, self.copied, self.until).view(-1, *own.shape[1:])
        own[: self.until] = sums.add_(own[: self.until]).to(own.dtype)
        return own


class GatherPrefix(torch.autograd.Function):
    """Gathers keys or values of a row for every span that sees them."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, prefix_index: _PrefixIndex) -> Tensor:
        """(tokens, heads, size) to (gathered keys, heads, size)."""
        ctx.prefix_index = prefix_index
        return row.index_select(0, prefix_index.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """A token's own gradient plus those of its copies."""
        return ctx.prefix_index.summed(gradient), None
