"""Log-probs of given tokens, a slice of the vocabulary matrix product at a time.

Logits of a whole batch would be tokens × vocabulary floats, gigabytes for a large vocabulary. Here only one slice of
rows exists at any moment, in the backward pass too, where it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrain.backends.local.model import Policy
from retrain.inference_engine.pytorch.sampler import shape_logits
from retrain.types import Sampling

# Bytes of float32 logits that may exist at once.
SLICE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def token_logprobs(
    policy: Policy, hidden: Tensor, targets: Tensor, sampling: Sampling, history: History | None
) -> Tensor:
    """Log-prob of each target under the sampled distribution, given the hidden state (tokens, size) before it."""
    rows = max(1, SLICE_BYTES.get(hidden.device.type, 64 << 20) // (4 * policy.vocabulary))

    def one_slice(states: Tensor, wanted: Tensor, seen: Tensor | None) -> Tensor:
        logits = shape_logits(policy.head(states), sampling, seen, keep=wanted)
        return logits.log_softmax(1).gather(1, wanted[:, None]).squeeze(1)

    pieces = []
    for start in range(0, len(targets), rows):
        stop = min(start + rows, len(targets))
        seen = history.seen(start, stop, policy.vocabulary) if history is not None else None
        if hidden.requires_grad:
            pieces.append(checkpoint(one_slice, hidden[start:stop], targets[start:stop], seen, use_reentrant=False))
        else:
            pieces.append(one_slice(hidden[start:stop], targets[start:stop], seen))
    result: Tensor = torch.cat(pieces)
    return result


class History:
    """Which tokens stand before each predicted one, for the repetition penalty."""

    def __init__(self, sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> None:
        self.sequences = sequences
        # (sequence, tokens before it) of every predicted token, in the order of `token_logprobs`' rows.
        self.rows = [
            (i, t) for i, (s, p) in enumerate(zip(sequences, prompt_lengths, strict=True)) for t in range(p, len(s))
        ]

    def seen(self, start: int, stop: int, vocabulary: int) -> Tensor:
        """A (rows, vocabulary) mask for a slice of rows."""
        mask = torch.zeros(stop - start, vocabulary, dtype=torch.bool, device=self.sequences[0].device)
        for row, (sequence, before) in enumerate(self.rows[start:stop]):
            mask[row, self.sequences[sequence][:before]] = True
        return mask
