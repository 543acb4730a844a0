"""Log-probs of TRL's batches without padding: rows are packed, and rows of one prompt share it.

The forward pass goes through the model as TRL wrapped it (PEFT, DDP, DeepSpeed, FSDP) and ends in TRL's fused head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from retrain.modeling.attention import attention_forward
from retrain.modeling.packing import MIN_SHARED, Layout
from retrain.modeling.prefix import SharedPrefixAttention, TokenSpan
from retrain.types import IntArray

PREFIX = "retrain-"
_is_packed: ContextVar[bool] = ContextVar("is_packed", default=False)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a padded batch as one row, and where their scored tokens are in both."""

    token_ids: IntArray
    positions: IntArray
    labels: IntArray
    """The token that each position predicts; -100 where none is scored."""
    spans: list[TokenSpan]
    scored: IntArray
    """Indices into the packed row, in the order of `rows` and `columns`."""
    rows: IntArray
    columns: IntArray

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Keyword arguments of the model."""

        def tensor(values: IntArray) -> Tensor:
            return torch.as_tensor(values, dtype=torch.long).to(device)[None]

        return {
            "input_ids": tensor(self.token_ids),
            "position_ids": tensor(self.positions),
            "shift_labels": tensor(self.labels),
            "attend": SharedPrefixAttention(self.spans, device),
        }

    def unpack(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Values of the packed row in the shape of the padded batch; 0 where nothing is scored."""
        scored, rows, columns = (
            torch.as_tensor(index, device=values.device) for index in (self.scored, self.rows, self.columns)
        )
        return values.new_zeros(shape).index_put((rows, columns), values[0].index_select(0, scored))


def pack_rows(input_ids: Tensor, attention_mask: Tensor, completion_width: int) -> PackedRows | None:
    """Pack left-padded prompts with right-padded completions; None where a prompt is empty or nothing is scored."""
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    cut = ids.shape[1] - completion_width
    prompts = [row[seen] for row, seen in zip(ids[:, :cut], mask[:, :cut], strict=True)]
    completions = [row[seen] for row, seen in zip(ids[:, cut:], mask[:, cut:], strict=True)]
    if not all(map(len, prompts)) or not any(map(len, completions)):
        return None
    layout, prefixes = Layout(), _shared_prefixes(prompts, completions)
    shared = {key: layout.add(prompt) for key, prompt in prefixes.items()}
    scored, rows, columns, labels = [], [], [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not len(completion):
            continue
        # The last token of a shared prompt is repeated: a position can predict one label only.
        prefix = shared.get(prompt.tobytes())
        own = prompt if prefix is None else prompt[-1:]
        span = layout.add(np.concatenate([own, completion[:-1]]), before=prefix)
        scored.append(span.start + len(own) - 1 + np.arange(len(completion)))
        rows.append(np.full(len(completion), row))
        columns.append(np.flatnonzero(mask[row, cut:]))
        labels.append(completion)
    at = np.concatenate(scored)
    targets = np.full(layout.tokens, -100)
    targets[at] = np.concatenate(labels)
    return PackedRows(
        np.concatenate(layout.token_ids),
        np.concatenate(layout.positions),
        targets,
        layout.spans,
        at,
        np.concatenate(rows),
        np.concatenate(columns),
    )


def _shared_prefixes(prompts: list[IntArray], completions: list[IntArray]) -> dict[bytes, IntArray]:
    """Prompts of several rows without their last token; none where sharing saves too little."""
    counts: dict[bytes, list[IntArray]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(completion):
            counts.setdefault(prompt.tobytes(), []).append(prompt)
    several = {key: group for key, group in counts.items() if len(group) > 1 and len(group[0]) > 1}
    saved = sum((len(group) - 1) * (len(group[0]) - 1) for group in several.values())
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    return {key: group[0][:-1] for key, group in several.items()} if saved >= MIN_SHARED * tokens else {}


class AttentionSwitch:
    """Selects our attention for packed forward passes of a model, and its own for all others.

    It stays selected until `restore`, because gradient checkpointing runs the layers again in the backward pass.
    """

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config()
        self.original: str = self.config._attn_implementation
        self.name = PREFIX + self.original
        self.reason = _find_obstacle(self.config)
        """Why packed passes are impossible; empty where they are possible."""
        try:
            own_attention = AttentionInterface()[self.original]
            own_mask = AttentionMaskInterface()[self.original]
        except KeyError:
            self.reason = f'attn_implementation="{self.original}" cannot be combined with packed rows'
            return
        AttentionInterface.register(self.name, _choose_attention(own_attention))
        AttentionMaskInterface.register(self.name, _choose_mask(own_mask))

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Run forward passes over packed rows."""
        self.config._attn_implementation = self.name
        token = _is_packed.set(True)
        try:
            yield
        finally:
            _is_packed.reset(token)

    def restore(self) -> None:
        """Select the model's own attention again."""
        if self.config._attn_implementation == self.name:
            self.config._attn_implementation = self.original

    def fits(self, config: Any) -> bool:
        """Whether this switch was made for a configuration as it is now."""
        return config.get_text_config() is self.config and self.config._attn_implementation in (
            self.original,
            self.name,
        )


def _find_obstacle(config: Any) -> str:
    """Why rows of a model must not be packed: layers that pass state along the row, or dropout in the attention."""
    values = config.to_dict()
    kinds = {*(values.get("layer_types") or ()), *(values.get("layers_block_type") or ())}
    others = sorted(str(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention"))
    others += sorted(key for key in values if key.startswith(("mamba_", "ssm_", "conv_", "linear_conv_")))[:1]
    if others:
        return f"layers of kind {others[0]} would pass state from row to row"
    return "attention_dropout is not 0" if values.get("attention_dropout") else ""


def _choose_attention(own: Any) -> Any:
    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if options.get("attend") is None:
            return own(module, query, key, value, mask, **options)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (each.to(dtype) for each in (query, key, value))
        return attention_forward(module, query, key, value, mask, **options)

    return torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


def _choose_mask(own: Any) -> Any:
    def make(*arguments: Any, **options: Any) -> Any:
        # Spans say who sees whom; a mask over a packed row would be quadratic in its length.
        return None if _is_packed.get() else own(*arguments, **options)

    return make
