"""Attention over a packed row in which completions of a group share one copy of their prompt.

A prompt is in the row once; each of its completions attends to it and to itself. Norms, projections and MLPs process a
prompt once per group instead of once per completion, and the gradients of all completions accumulate in its keys and
values. Results equal those of complete sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.modeling.attention import Scoring, causal_attention
from retrain.modeling.determinism import sum_by_row
from retrain.modeling.policy import Policy
from retrain.modeling.torch_internals import flash_attention_varlen

# Largest head size of flash attention; sizes are multiples of 8.
_MAX_FLASH_HEAD = 256
_MAX_CUDNN_HEAD = 128
# From this length on, cuDNN's attention is faster (H200: twice as fast at 9,000 tokens), and lengths that it sees.
LONG = 4096
LENGTH_STEP = 512


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

    Flash attention takes spans of any length; for long ones, cuDNN's is faster. Elsewhere, spans with prefixes of equal
    length are padded on the right for this operation.
    """

    def __init__(self, spans: Sequence[TokenSpan], device: torch.device) -> None:
        self.spans = spans
        self.device = device
        self.prefix_index = _PrefixIndex.plan(spans, device) if any(span.prefix for span in spans) else None
        self.row = _Run.of(spans, device)
        is_long = any(span.seen >= LONG for span in spans)
        self.runs = [_Run.of(run, device) for run in _long_spans_apart(spans)] if is_long else []
        """The same spans, long ones apart; empty where none is long."""
        self._padding: _Padding | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention output of one layer; tensors are (1, heads, tokens, head size)."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if len(self.spans) == 1 and not can_flash(q, scoring):
            return causal_attention(query, key, value, scoring)
        if self.prefix_index is not None:
            k, v = (GatherPrefix.apply(tensor, self.prefix_index) for tensor in (k, v))  # type: ignore[no-untyped-call]
        if not can_flash(q, scoring):
            output = self._padded(q, k, v, scoring)
        elif self.runs and can_use_cudnn(q, scoring):
            output = self._by_length(q, k, v, scoring)
        else:
            output = self.row.flash(q, k, v, scoring)
        return output.transpose(0, 1).unsqueeze(0)

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Long spans one by one, the others together."""
        queries, keys = [run.queries for run in self.runs], [run.keys for run in self.runs]
        sizes = (query, queries), (key, keys), (value, keys)
        parts = zip(self.runs, *(torch.split(tensor, part) for tensor, part in sizes), strict=True)
        return torch.cat([
            run.cudnn(query, q, k, v, scoring) if run.is_long else run.flash(q, k, v, scoring)
            for run, q, k, v in parts
        ])  # fmt: skip

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self._padding = self._padding or _Padding.plan(self.spans, self.device)
        outputs = [rows.attend(query, key, value, scoring) for rows in self._padding.rows]
        return torch.cat(outputs).index_select(0, self._padding.cells)


@dataclass(frozen=True)
class _Run:
    """Consecutive spans, for one call of an attention kernel."""

    spans: Sequence[TokenSpan]
    ends: tuple[Tensor, Tensor]
    """Of the queries and the keys of each span."""

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> _Run:
        lengths = [span.length for span in spans], [span.seen for span in spans]
        queries, keys = (torch.tensor(np.cumsum([0, *n]), dtype=torch.int32, device=device) for n in lengths)
        return cls(spans, (queries, keys))

    @property
    def queries(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def keys(self) -> int:
        return sum(span.seen for span in self.spans)

    @property
    def is_long(self) -> bool:
        return self.spans[0].seen >= LONG

    def flash(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Queries are aligned with the end of their keys, as `is_causal` means here."""
        longest = max(span.length for span in self.spans), max(span.seen for span in self.spans)
        window = -1 if scoring.window is None or scoring.window >= longest[1] else scoring.window - 1
        return flash_attention_varlen(query, key, value, self.ends, longest, scoring.scale, window)

    def cudnn(self, row: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """One long span. Its padding is never visible: cuDNN plans its kernels anew, in 0.1 s, for every length."""
        (span,) = self.spans
        before = row[span.prefix_start : span.prefix_start + span.prefix].detach()
        padding = (0, 0, 0, 0, 0, -span.seen % LENGTH_STEP)
        q, k, v = (F.pad(part, padding).transpose(0, 1)[None] for part in (torch.cat([before, query]), key, value))
        return causal_attention(q, k, v, scoring)[0, :, span.prefix : span.seen].transpose(0, 1)


def _long_spans_apart(spans: Sequence[TokenSpan]) -> list[list[TokenSpan]]:
    runs: list[list[TokenSpan]] = []
    for span in spans:
        if not runs or max(span.seen, runs[-1][-1].seen) >= LONG:
            runs.append([])
        runs[-1].append(span)
    return runs


def can_flash(query: Tensor, scoring: Scoring) -> bool:
    """Whether flash attention supports these queries (tokens, heads, head size)."""
    size = query.shape[2]
    return (
        scoring.softcap is None and size <= _MAX_FLASH_HEAD and size % 8 == 0 and _has_flash(query.device, query.dtype)
    )


def can_use_cudnn(query: Tensor, scoring: Scoring) -> bool:
    """Whether PyTorch uses cuDNN's attention for these queries. Its backward pass is not deterministic."""
    return (
        scoring.window is None
        and query.shape[2] <= _MAX_CUDNN_HEAD
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def takes_uneven_lengths(policy: Policy) -> bool:
    """Whether attention runs without padding for this model."""
    settings = policy.causal_lm.config.get_text_config().to_dict()
    uses_ours = not policy.attention_fallback_reason and not settings.get("attn_logit_softcapping")
    return uses_ours and _has_flash(policy.device, policy.dtype)


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


class GatherPrefix(torch.autograd.Function):
    """Gathers keys or values of a row for every span that sees them; gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, prefix_index: _PrefixIndex) -> Tensor:
        """(tokens, heads, size) to (gathered keys, heads, size)."""
        ctx.prefix_index = prefix_index
        return row.index_select(0, prefix_index.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """A token's own gradient plus those of its copies."""
        prefix_index: _PrefixIndex = ctx.prefix_index
        own = gradient.index_select(0, prefix_index.own)
        copies = gradient.index_select(0, prefix_index.copies).float().flatten(1)
        sums = sum_by_row(copies, prefix_index.copied, prefix_index.until).view(-1, *own.shape[1:])
        own[: prefix_index.until] = sums.add_(own[: prefix_index.until]).to(own.dtype)
        return own, None
