"""Forward passes with the model's own attention and transformers' KV cache; prompts are padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor

from retrain.inference_engine.pytorch.decoder import Row
from retrain.modeling.causal_lm import KeyValueCache, module_of
from retrain.modeling.policy import Policy


class NativeForward:
    """The policy as Hugging Face runs it, adapter included. Slow, but supports every model that `generate` does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.cache: KeyValueCache | None = None
        self.takes_positions = "position_ids" in signature(module_of(policy.causal_lm).forward).parameters

    def begin(self, rows: Sequence[Row]) -> Tensor:
        """Prefill left-padded prompts."""
        device, longest = self.policy.device, max(len(row.prompt) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
        self.mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, longest - len(row.prompt) :] = torch.as_tensor(row.prompt, device=device)
            self.mask[index, longest - len(row.prompt) :] = 1
        return self._run(ids)

    def advance(self, tokens: Tensor) -> Tensor:
        """Decode one token."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        return self._run(tokens[:, None])

    def keep(self, rows: Tensor) -> None:
        """Drop the other rows from the cache."""
        self.mask = self.mask.index_select(0, rows)
        assert self.cache is not None
        # Unlike `batch_select_indices`, every kind of layer has it, those with a recurrent state too.
        self.cache.reorder_cache(rows)

    def _run(self, ids: Tensor) -> Tensor:
        model = self.policy.causal_lm
        # Padding has no position: learned embeddings of positions would be those of other tokens.
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs = model.prepare_inputs_for_generation(
            ids,
            past_key_values=self.cache,
            attention_mask=self.mask,
            use_cache=True,
            **({"position_ids": positions} if self.takes_positions else {}),
        )
        output = model(**inputs)
        self.cache = output.past_key_values
        return output.logits[:, -1]
