"""The kernels of the decode step once more, as plain loops.

Triton's are compared with these, and these stand in for them where there is no GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from retrain.capacity.sampling import BLOCK
from retrain.inference_engine.pytorch.cache import Store, pack, unpack
from retrain.inference_engine.pytorch.slots import Slots
from retrain.modeling.attention import Scoring


def decode_attention(
    query: Tensor,
    pair: tuple[Tensor, Tensor],
    stores: tuple[Store, Store],
    table: Tensor,
    cached: Tensor,
    scoring: Scoring,
    splits: int,
) -> Tensor:
    output = torch.empty_like(query)
    for row in range(len(query)):
        end = int(cached[row]) + 1
        held = []
        for store, new in zip(stores, pair, strict=True):
            dtype = torch.float8_e4m3fn if store.values.dtype == torch.uint8 else store.values.dtype
            at = torch.arange(end)
            block, place = table[row, at // BLOCK].long(), at % BLOCK
            for part, one in zip(store.parts, pack(new[row, :, 0], dtype).parts, strict=True):
                part[block[-1], :, place[-1]] = one
            first = 0 if scoring.window is None else max(0, end - scoring.window)
            tokens = store.each(lambda part, at=(block[first:], place[first:]): part[at[0], :, at[1]].transpose(0, 1))  # type: ignore[misc]
            held.append(unpack(tokens, query.dtype).float())
        for head in range(query.shape[1]):
            keys, values = (part[head * pair[0].shape[1] // query.shape[1]] for part in held)
            scores = keys @ query[row, head, 0].float() * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            output[row, head, 0] = (scores.softmax(0) @ values).to(query.dtype)
    return output


def draw_tokens(logits: Tensor, state: Slots, slots: Tensor) -> None:
    for row, slot in enumerate(slots.tolist()):
        logprobs = (logits[row].double() / float(state.temperature)).log_softmax(0)
        count = int(state.drawn[slot])
        draws = np.random.default_rng((int(state.seeds[slot]), int(state.numbers[slot]), count))
        token = int(np.searchsorted(np.cumsum(logprobs.exp().numpy()), draws.random()))
        token = min(token, len(logprobs) - 1)
        state.next_token[slot] = token
        if state.done[slot]:
            continue
        state.tokens[slot, count] = token
        state.logprobs[slot, count] = logprobs[token]
        state.entropies[slot, count] = torch.special.entr(logprobs.exp()).sum()
        state.drawn[slot] += 1
        state.cached[slot] += 1
        state.done[slot] = 1 if token in state.stops.tolist() else 2 * int(count + 1 >= int(state.limits[slot]))
