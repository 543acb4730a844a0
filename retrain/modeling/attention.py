"""Our attention in Hugging Face models, registered through transformers' attention interface.

Every forward pass has an attention object: over packed sequences for training and prefill, over a KV cache for
decoding. Layers, norms and rotary embeddings are those of Hugging Face.

A model that is only sampled from gets it from `attending`, and calls it through an operator that the compiler treats as
a black box: a layer is then one compiled graph, for prompts and for single tokens alike. A model that is trained gets
it as an argument, `model(..., attend=...)`: either the handle of an attention that has a backward pass, which is an
operator, too, or any other attention, which causes a graph break in compiled layers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from retrain.modeling.causal_lm import Backbone

ATTENTION_NAME = "retrain"
SAMPLING_NAME = "retrain_sampling"


@dataclass(frozen=True)
class Scoring:
    """How a layer scores queries against keys."""

    scale: float
    window: int | None = None
    """Sliding window in tokens, the query included; None for full attention."""
    softcap: float | None = None


class Attention(Protocol):
    """Attention of one forward pass. Tensors are (batch, heads, tokens, head size)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """The attention output, shaped like `query`."""
        ...


class FusedAttention(Protocol):
    """Attention over a packed row, with a backward pass. Tensors are (tokens, heads, head size)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """The attention output, and the log-sum-exp of the scores, (heads, tokens)."""
        ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of queries, keys and values."""
        ...


_fused: WeakValueDictionary[int, FusedAttention] = WeakValueDictionary()
_numbers = itertools.count()


def handle_of(attention: FusedAttention) -> Tensor:
    """A tensor that stands for an attention in compiled code, and keeps it until the backward pass is done."""
    number = next(_numbers)
    _fused[number] = attention
    handle = torch.tensor(number)
    handle.attention = attention  # type: ignore[attr-defined]
    return handle


def register() -> None:
    """Register both implementations with transformers; idempotent.

    There is deliberately no entry in the mask registry: transformers then builds no mask, which would be quadratic in
    the packed length. The attention object does the masking.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionInterface.register(SAMPLING_NAME, sampling_attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attention | Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one layer, by the `attend` of this forward pass."""
    scale = _scale(query, scaling, s_aux)
    if isinstance(attend, Tensor):
        return attend_packed(query, key, value, attend, scale, sliding_window)[0], None
    return _attend_by_object(module, query, key, value, attend, scale, sliding_window, softcap), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_object(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend: Attention, scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    scoring = Scoring(scale, window, softcap)
    return attend.attend(int(module.layer_idx), query, key, value, scoring).transpose(1, 2)  # type: ignore[arg-type]


@torch.library.custom_op("retrain::attend_packed", mutates_args=())
def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, handle: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention by the object of a handle: (1, tokens, heads, head size), and the log-sum-exp of the scores."""
    output, logsumexp = _fused[int(handle)].forward(*_rows(query, key, value), Scoring(scale, window))
    return output[None], logsumexp


@attend_packed.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, handle: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[-1])
    return output, query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("retrain::attend_packed_backward", mutates_args=())
def _attend_packed_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, handle: Tensor,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = _rows(query, key, value)
    found = _fused[int(handle)].backward(gradient[0], *rows, output[0], logsumexp, Scoring(scale, window))
    dq, dk, dv = (part.contiguous().transpose(0, 1)[None] for part in found)
    return dq, dk, dv


@_attend_packed_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, handle: Tensor,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (part.new_empty(part.transpose(1, 2).shape).transpose(1, 2) for part in (query, key, value))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, tensors[3])
    ctx.scale, ctx.window = scale, window


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _attend_packed_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window)
    return dq, dk, dv, None, None, None


attend_packed.register_autograd(_differentiate, setup_context=_save)


def _rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, heads, tokens, head size) to (tokens, heads, head size)."""
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


def sampling_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one layer, by the object of the current `attending`."""
    scale = _scale(query, scaling, s_aux)
    # An operator costs microseconds per call, which layers that are not compiled need not pay.
    attend = attend_operator if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, scale, sliding_window, softcap), None


def _scale(query: Tensor, scaling: float | None, s_aux: Tensor | None) -> float:
    if s_aux is not None:
        raise TypeError("attention sinks are not supported")
    return scaling if scaling is not None else query.shape[-1] ** -0.5


class _ForwardPass(threading.local):
    attend: Attention | None = None
    layer = 0


_pass = _ForwardPass()


@contextmanager
def attending(attend: Attention) -> Iterator[None]:
    """Context for one forward pass of a sampling model in this thread.

    Layers must run in order, which `find_attention_fallback` checks.
    """
    _pass.attend, _pass.layer = attend, 0
    try:
        yield
    finally:
        _pass.attend = None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of the next layer of the current forward pass: (batch, tokens, heads, head size)."""
    assert _pass.attend is not None, "a sampling model runs within `attending`"
    layer, _pass.layer = _pass.layer, _pass.layer + 1
    output = _pass.attend.attend(layer, query, key, value, Scoring(scale, window, softcap))
    return output.transpose(1, 2).contiguous()


attend_operator = torch.library.custom_op("retrain::attend", _attend, mutates_args=())


@attend_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


class PackedAttention:
    """Causal attention within each sequence of a packed row.

    Sequences are padded on the right for this operation only: a causal query never sees later padding, so no mask is
    needed and fused kernels apply.
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

    def run_padded(self, backbone: Backbone, token_ids: Tensor) -> Tensor:
        """Last hidden states of a packed row, from a model with its own attention: sequences become padded rows."""
        if self.is_dense:
            rows = token_ids.reshape(self.rows, self.longest)
            states = backbone(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False).last_hidden_state
            return states.reshape(1, self.rows * self.longest, -1)
        rows = token_ids[0].index_select(0, self.padded).reshape(self.rows, self.longest)
        states = backbone(input_ids=rows, attention_mask=self.inside.long(), use_cache=False).last_hidden_state
        return states.reshape(self.rows * self.longest, -1).index_select(0, self.packed)[None]

    def _pad(self, packed: Tensor) -> Tensor:
        flat = packed[0].transpose(0, 1)
        if not self.is_dense:
            flat = flat.index_select(0, self.padded)
        return flat.reshape(self.rows, self.longest, *flat.shape[1:]).transpose(1, 2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, prefix: int = 0) -> Tensor:
    """Causal self-attention; queries start after the first `prefix` keys."""
    length = key.shape[2]
    if not prefix and scoring.softcap is None and (scoring.window is None or scoring.window >= length):
        grouped = query.shape[1] != key.shape[1]
        with _unplanned(query.device):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=grouped
            )
    positions = torch.arange(length, device=query.device)
    sees = visible(positions[prefix:, None], positions[None, :], scoring.window)
    return masked_attention(query, key, value, sees, scoring)


def _unplanned(device: torch.device) -> AbstractContextManager[None]:
    """Not cuDNN, which PyTorch prefers on new GPUs: it plans every new length for 60 ms, and lengths vary here."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends) if device.type == "cuda" else nullcontext()


def visible(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Mask of the keys that each query sees, by position."""
    sees = key_position <= query_position
    return sees if window is None else sees & (key_position > query_position - window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scoring: Scoring) -> Tensor:
    """Attention with a boolean mask, and logit soft-capping for models that use it."""
    grouped = query.shape[1] != key.shape[1]
    if scoring.softcap is None:
        with _unplanned(query.device):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=sees, scale=scoring.scale, enable_gqa=grouped
            )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scoring.scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1).to(query.dtype)
    return weights @ value
