"""Our attention inside Hugging Face models, plugged in through their attention registry.

A forward pass is given an object that knows how its tokens attend (`model(..., attend=...)`): over packed sequences
when training and prefilling, over a KV cache when decoding. Layers, norms and rotary embeddings stay Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "retrain"


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into weights."""

    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None sees all before it."""
    softcap: float | None = None


class Attention(Protocol):
    """How the tokens of one forward pass attend. Tensors are (batch, heads, tokens, head size)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """The attention output, shaped like `query`."""
        ...


def register() -> None:
    """Make `attn_implementation="retrain"` known to transformers; doing so twice is harmless.

    There is no entry in the mask registry on purpose: transformers then makes no mask, which over a packed row would be
    quadratic in it. Who sees whom is the attention object's business. Compiled layers call it as it is.
    """
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_forward))  # type: ignore[no-untyped-call]


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    output = attend.attend(int(module.layer_idx), query, key, value, scoring)  # type: ignore[arg-type]
    return output.transpose(1, 2), None


class PackedAttention:
    """Causal attention within each of several sequences that lie end to end in one row.

    Sequences are padded on the right for this one operation: a causal query never sees padding that comes after it, so
    no mask is needed and the fused kernels apply.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.rows, self.longest = len(lengths), max(lengths)
        self.is_dense = min(lengths) == self.longest
        if not self.is_dense:
            lengths_t = torch.tensor(lengths, device=device)
            starts = lengths_t.cumsum(0) - lengths_t
            columns = torch.arange(self.longest, device=device)
            self.inside = columns < lengths_t[:, None]
            self.padded = torch.where(self.inside, starts[:, None] + columns, 0).flatten()
            self.packed = self.inside.flatten().nonzero().squeeze(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Pad, attend causally, and pack again."""
        output = causal_attention(self._pad(query), self._pad(key), self._pad(value), scoring)
        flat = output.transpose(1, 2).reshape(self.rows * self.longest, *output.shape[1::2])
        if not self.is_dense:
            flat = flat.index_select(0, self.packed)
        return flat.transpose(0, 1).unsqueeze(0)

    def run_padded(self, backbone: Any, token_ids: Tensor) -> Tensor:
        """Last hidden states of a packed row from a model that attends by itself: sequences as rows under a mask."""
        if self.is_dense:
            rows = token_ids.reshape(self.rows, self.longest)
            states = backbone(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False).last_hidden_state
            return states.reshape(1, self.rows * self.longest, -1)  # type: ignore[no-any-return]
        rows = token_ids[0].index_select(0, self.padded).reshape(self.rows, self.longest)
        states = backbone(input_ids=rows, attention_mask=self.inside.long(), use_cache=False).last_hidden_state
        return states.reshape(self.rows * self.longest, -1).index_select(0, self.packed)[None]  # type: ignore[no-any-return]

    def _pad(self, packed: Tensor) -> Tensor:
        flat = packed[0].transpose(0, 1)
        if not self.is_dense:
            flat = flat.index_select(0, self.padded)
        return flat.reshape(self.rows, self.longest, *flat.shape[1:]).transpose(1, 2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, prefix: int = 0) -> Tensor:
    """Attention of sequences on themselves; queries begin after `prefix` of the keys."""
    length = key.shape[2]
    if not prefix and scoring.softcap is None and (scoring.window is None or scoring.window >= length):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=grouped
        )
    positions = torch.arange(length, device=query.device)
    sees = visible(positions[prefix:, None], positions[None, :], scoring.window)
    return masked_attention(query, key, value, sees, scoring)


def visible(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Which keys a query may see, by position."""
    sees = key_position <= query_position
    return sees if window is None else sees & (key_position > query_position - window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scoring: Scoring) -> Tensor:
    """Attention under a boolean mask, with the score cap that some models use."""
    grouped = query.shape[1] != key.shape[1]
    if scoring.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=scoring.scale, enable_gqa=grouped
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scoring.scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1).to(query.dtype)
    return weights @ value
