"""Log-probs of TRL's batches without padding: rows are packed, and rows with the same prompt share it.

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
from retrain.modeling.packing import lay_out
from retrain.modeling.prefix import SharedPrefixAttention
from retrain.types import Datum, IntArray

PREFIX = "retrain-"
NONE = np.empty(0)
_is_packed: ContextVar[bool] = ContextVar("is_packed", default=False)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a padded batch as one row."""

    inputs: dict[str, object]
    """Keyword arguments of the model."""
    scored: Tensor
    """Indices of the row that predict the scored tokens, in the order of `mask`."""
    mask: Tensor
    """Scored tokens of the padded batch."""

    def unpack(self, values: Tensor) -> Tensor:
        """Values of the packed row in the shape of the padded batch; 0 where nothing is scored."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[0].index_select(0, self.scored))


def pack_rows(input_ids: Tensor, attention_mask: Tensor, completion_width: int) -> PackedRows | None:
    """Pack left-padded prompts with right-padded completions; None where a prompt is empty or nothing is scored."""
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    cut = ids.shape[1] - completion_width
    prompts = [row[seen] for row, seen in zip(ids[:, :cut], mask[:, :cut], strict=True)]
    completions = [row[seen] for row, seen in zip(ids[:, cut:], mask[:, cut:], strict=True)]
    if not all(map(len, prompts)) or not any(map(len, completions)):
        return None
    # A position can predict one label only, so the last token of a shared prompt is repeated in every row.
    datums = [
        Datum(prompt[:-1], np.concatenate([prompt[-1:], completion]), NONE, NONE, NONE.astype(bool))
        for prompt, completion in zip(prompts, completions, strict=True)
        if len(completion)
    ]
    layout = lay_out(datums, share=True)
    scored = np.concatenate([predicting[1:] for predicting in layout.predicting])
    labels = np.full(layout.tokens, -100)
    labels[scored] = np.concatenate(completions)

    def tensor(values: IntArray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long).to(input_ids.device)

    inputs = {
        "input_ids": tensor(np.concatenate(layout.token_ids))[None],
        "position_ids": tensor(np.concatenate(layout.positions))[None],
        "shift_labels": tensor(labels)[None],
        "attend": SharedPrefixAttention(layout.spans, input_ids.device),
    }
    return PackedRows(inputs, tensor(scored), attention_mask[:, cut:] > 0)


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
        """Context in which forward passes are over packed rows."""
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
        """Whether this switch was made for this configuration, and its attention has not been replaced since."""
        selected = self.config._attn_implementation
        return config.get_text_config() is self.config and selected in (self.original, self.name)


def _find_obstacle(config: Any) -> str:
    """Why rows of a model must not be packed: layers that pass state along the row, or dropout in the attention."""
    values = config.to_dict()
    kinds = {*(values.get("layer_types") or ()), *(values.get("layers_block_type") or ())}
    others = sorted(str(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention"))
    others += sorted(key for key in values if key.startswith(("mamba_", "ssm_", "conv_", "linear_conv_")))[:1]
    if others:
        return f"layers of kind {others[0]} would pass state from row to row"
    return "attention_dropout is not 0" if values.get("attention_dropout") else find_length_dependence(config)


def find_length_dependence(config: Any) -> str:
    """Rotary embeddings that change with the longest row of a batch, padding included; "" if there are none."""
    rope = config.get_text_config().to_dict().get("rope_parameters") or {}
    kinds = {str(table.get("rope_type")) for table in (rope, *rope.values()) if isinstance(table, dict)}
    changing = sorted(kinds & {"dynamic", "longrope"})
    return f"its {changing[0]} rotary embedding depends on the length of the batch" if changing else ""


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
        # Spans define which tokens attend to which; a mask over a packed row would be quadratic in its length.
        return None if _is_packed.get() else own(*arguments, **options)

    return make
