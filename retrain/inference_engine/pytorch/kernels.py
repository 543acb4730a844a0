"""Triton kernels of the decode step: attention over the KV cache, and sampling from logits.

Both read their inputs once. Decode attention is bound by reading keys and values, so one program serves all query heads
of a key head; sampling is bound by reading logits, so one pass gives the token, its log-prob and the entropy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.inference_engine.pytorch.cache import FP8, Store
from retrain.inference_engine.pytorch.decode_step import MAX_SPLITS
from retrain.inference_engine.pytorch.launching import await_inputs, launch_options
from retrain.inference_engine.pytorch.slots import Slots
from retrain.modeling.attention import Scoring

# Wider than any context.
NO_WINDOW = 1 << 30
# Minimum size of a matrix instruction; query heads of one group, and small heads, are padded to it.
MIN_ROWS = 16
# Vocabulary entries per program.
VOCABULARY_BLOCK = 4096


@triton.jit
def _cap(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * (scores / softcap))) - 1.0)
    return scores


@triton.jit
def _pack(x, IN_FP8: tl.constexpr, SCALED: tl.constexpr):
    """One token's values as rounded in the cache, and their scale; the same as `pack` in cache.py."""
    x = x.to(tl.float32)
    scale = 1.0
    if IN_FP8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if SCALED:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / 127.0, 1e-8)
        x = tl.floor(x / scale + 0.5)
    return x, scale


@triton.jit
def _join(query, new, cache, scales, at, scale_at, is_size, IN_FP8: tl.constexpr, SCALED: tl.constexpr):
    """Store a new token's key or value; returns it as later queries will read it."""
    packed, scale = _pack(tl.load(new, mask=is_size, other=0.0), IN_FP8, SCALED)
    stored = packed.to(cache.dtype.element_ty)
    tl.store(cache + at, stored, mask=is_size)
    if SCALED:
        tl.store(scales + scale_at, scale)
    return (stored.to(tl.float32) * scale).to(query.dtype).to(tl.float32)


@triton.jit
def _weigh(scores, best, total):
    """One step of an online softmax: new maximum, new sum, this block's weights, and the rescaling of earlier ones."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - new_best[:, None])
    shrink = tl.exp(best - new_best)
    return new_best, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def _store_result(
    gathered, best, total, output, partial_output, partial_stats, at, split, splits, is_head, sizes,
    SIZE: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a finished row, or what one split of it found, for `_combine`."""
    is_out = is_head[:, None] & (sizes < SIZE)[None, :]
    if not IS_SPLIT:
        result = gathered / total[:, None]
        tl.store(output + at[:, None] * SIZE + sizes[None, :], result.to(output.dtype.element_ty), mask=is_out)
    else:
        part = at * splits + split
        tl.store(partial_stats + part * 2, best, mask=is_head)
        tl.store(partial_stats + part * 2 + 1, total, mask=is_head)
        tl.store(partial_output + part[:, None] * SIZE + sizes[None, :], gathered, mask=is_out)


@triton.jit
def _read(
    q, key_cache, value_cache, key_scales, value_scales, base, sizes, first, count, scale, softcap, best, total,
    gathered, SIZE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attend over tokens `first` to `count` of one block of the cache."""
    tokens = tl.arange(0, BLOCK)
    inside = (tokens >= first) & (tokens < count)
    offsets = base + tokens[:, None] * SIZE + sizes[None, :]
    is_held = inside[:, None] & (sizes < SIZE)[None, :]
    k = tl.load(key_cache + offsets, mask=is_held, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SCALED:
        scores *= tl.load(key_scales + base // SIZE + tokens, mask=inside, other=0.0)[None, :]
    scores = tl.where(inside[None, :], _cap(scores, softcap, CAPPED), float("-inf"))
    best, total, weights, shrink = _weigh(scores, best, total)
    if SCALED:
        weights *= tl.load(value_scales + base // SIZE + tokens, mask=inside, other=0.0)[None, :]
    v = tl.load(value_cache + offsets, mask=is_held, other=0.0).to(q.dtype)
    return best, total, gathered * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")


# Not compiled again for other lengths of rows and other batches.
@triton.jit(do_not_specialize=["table_row", "splits"])
def _attend(
    query, new_key, new_value, key_cache, value_cache, key_scales, value_scales, table, cached,
    output, partial_output, partial_stats, scale, window, softcap,
    query_row, query_head, key_row, key_head, value_row, value_head, table_row, cache_block, cache_head, splits,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    IS_SPLIT: tl.constexpr, HEADS: tl.constexpr, CAPPED: tl.constexpr, IN_FP8: tl.constexpr, SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(cached + row)
    heads = tl.arange(0, ROWS)
    sizes = tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    q_at = query + row * query_row + (head * GROUP + heads)[:, None] * query_head + sizes[None, :]
    q = tl.load(q_at, mask=(heads < GROUP)[:, None] & is_size[None, :], other=0.0)

    # Splits begin at the beginning of a block.
    first = tl.maximum(length + 1 - window, 0)
    begin = first // BLOCK * BLOCK
    per_split = tl.cdiv(tl.cdiv(length - begin, splits), BLOCK) * BLOCK
    start = begin + split * per_split
    stop = tl.minimum(start + per_split, length)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, SIZE_PAD), tl.float32)
    for position in range(start, stop, BLOCK):
        block = tl.load(table + row * table_row + position // BLOCK).to(tl.int64)
        best, total, gathered = _read(
            q, key_cache, value_cache, key_scales, value_scales, block * cache_block + head * cache_head, sizes,
            first - position, stop - position, scale, softcap, best, total, gathered, SIZE, BLOCK, CAPPED, SCALED,
        )  # fmt: skip

    if split == splits - 1:
        # The new token is not in the cache yet: it is attended to from registers, then stored.
        k_at = new_key + row * key_row + head * key_head + sizes
        v_at = new_value + row * value_row + head * value_head + sizes
        block = tl.load(table + row * table_row + length // BLOCK).to(tl.int64)
        place = block * cache_block + head * cache_head + length % BLOCK * SIZE
        slot, scale_at = place + sizes, place // SIZE
        k_new = _join(q, k_at, key_cache, key_scales, slot, scale_at, is_size, IN_FP8, SCALED)
        v_new = _join(q, v_at, value_cache, value_scales, slot, scale_at, is_size, IN_FP8, SCALED)
        own = _cap(tl.sum(q.to(tl.float32) * k_new[None, :], 1) * scale, softcap, CAPPED)
        best, total, weights, shrink = _weigh(own[:, None], best, total)
        gathered = gathered * shrink[:, None] + weights * v_new[None, :]

    at = (row * HEADS + head) * GROUP + heads
    _store_result(
        gathered, best, total, output, partial_output, partial_stats, at, split, splits, heads < GROUP, sizes, SIZE,
        IS_SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial_output, partial_stats, output, splits, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, MOST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST)
    sizes = tl.arange(0, SIZE_PAD)
    is_split = split < splits
    stats_at = partial_stats + (row * splits + split) * 2
    best = tl.load(stats_at, mask=is_split, other=float("-inf"))
    total = tl.load(stats_at + 1, mask=is_split, other=0.0)
    shrink = tl.exp(best - tl.max(best, 0))
    at = (row * splits + split)[:, None] * SIZE + sizes[None, :]
    gathered = tl.load(partial_output + at, mask=is_split[:, None] & (sizes < SIZE)[None, :], other=0.0)
    result = tl.sum(gathered * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(output + row * SIZE + sizes, result.to(output.dtype.element_ty), mask=sizes < SIZE)


def decode_attention(
    query: Tensor, pair: tuple[Tensor, Tensor], stores: tuple[Store, Store], table: Tensor, cached: Tensor,
    scoring: Scoring, splits: int,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row over its blocks of the cache; appends the token to it.

    query (rows, heads, 1, size); the pair of key and value (rows, key heads, 1, size); stores (blocks, key heads,
    tokens, size); `table` has the blocks of each row, `cached` its length without the new token.
    """
    rows, heads, _, size = query.shape
    key, value = pair
    key_heads = key.shape[1]
    output = torch.empty(rows, heads, 1, size, dtype=query.dtype, device=query.device)
    parts = rows * heads * splits if splits > 1 else 1
    partial_output = torch.empty(parts, size, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(parts, 2, dtype=torch.float32, device=query.device)
    in_fp8, is_scaled = stores[0].values.dtype == torch.uint8, stores[0].scales is not None
    keys, values = (store.values.view(FP8) if in_fp8 else store.values for store in stores)
    # Placeholder without scales; never read.
    key_scales, value_scales = (store.scales if store.scales is not None else partial_stats for store in stores)
    pad = max(MIN_ROWS, triton.next_power_of_2(size))
    _attend[(rows, key_heads, splits)](
        query, key, value, keys, values, key_scales, value_scales, table, cached, output, partial_output, partial_stats,
        scoring.scale, NO_WINDOW if scoring.window is None else scoring.window, scoring.softcap or 1.0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        table.stride(0), keys.stride(0), keys.stride(1), splits, GROUP=heads // key_heads, SIZE=size, SIZE_PAD=pad,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(heads // key_heads)), BLOCK=keys.shape[2], IS_SPLIT=splits > 1,
        HEADS=key_heads, CAPPED=scoring.softcap is not None, IN_FP8=in_fp8, SCALED=is_scaled, num_warps=4, num_stages=3,
        **launch_options(query.device),
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](
            partial_output, partial_stats, output, splits, SIZE=size, SIZE_PAD=pad, MOST=MAX_SPLITS, num_warps=2,
            **launch_options(query.device),
        )  # fmt: skip
    return output


@triton.jit
def _scan_vocabulary(
    logits, slots, numbers, seeds, drawn, temperature, stats, choices, logits_row, vocabulary, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    x = tl.load(logits + row * logits_row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature)
    most = tl.max(x, 0)
    # A block may contain only filtered tokens; its weights are then zero, not NaN.
    floor = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(x - floor)
    finite = tl.where(x == float("-inf"), 0.0, x)

    # Exponential race: the token with the smallest Exp(1) / probability is a sample. The counters are (token, row
    # number, position), so a row does not depend on its batch. One Philox call makes four numbers.
    quarter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    which = quarter * 0 + tl.load(numbers + slot).to(tl.uint32)
    position = quarter * 0 + tl.load(drawn + slot).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seeds + slot), quarter, which, position, quarter * 0)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,))
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    waiting = tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - u))
    race = tl.where(inside, x - tl.log(waiting), float("-inf"))
    winner = tl.argmax(race, 0)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == winner, finite, 0.0), 0)
    at = (row * blocks + block) * 5
    tl.store(stats + at, most)
    tl.store(stats + at + 1, tl.sum(weights, 0))
    tl.store(stats + at + 2, tl.sum(weights * finite, 0))
    tl.store(stats + at + 3, tl.max(race, 0))
    tl.store(stats + at + 4, chosen)
    tl.store(choices + row * blocks + block, block * BLOCK + winner)


@triton.jit(do_not_specialize=["width"])
def _settle(
    stats, choices, slots, drawn, cached, limits, done, next_token,
    out_tokens, out_logprobs, out_entropies, stops, blocks, width,
    STOPS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    index = tl.arange(0, BLOCKS_PAD)
    inside = index < blocks
    at = stats + (row * blocks + index) * 5
    most = tl.load(at, mask=inside, other=float("-inf"))
    top = tl.max(most, 0)
    shrink = tl.exp(tl.where(most == float("-inf"), float("-inf"), most - top))
    total = tl.sum(tl.load(at + 1, mask=inside, other=0.0) * shrink, 0)
    weighted = tl.sum(tl.load(at + 2, mask=inside, other=0.0) * shrink, 0)
    race = tl.load(at + 3, mask=inside, other=float("-inf"))
    winner = tl.argmax(race, 0)
    chosen = tl.sum(tl.where(index == winner, tl.load(at + 4, mask=inside, other=0.0), 0.0), 0)
    token = tl.sum(tl.where(index == winner, tl.load(choices + row * blocks + index, mask=inside, other=0), 0), 0)
    normalizer = top + tl.log(total)

    finished = tl.load(done + slot)
    count = tl.load(drawn + slot)
    is_running = finished == 0
    place = slot * width + count
    tl.store(out_tokens + place, token, mask=is_running)
    tl.store(out_logprobs + place, chosen - normalizer, mask=is_running)
    tl.store(out_entropies + place, normalizer - weighted / total, mask=is_running)
    is_stop = tl.load(stops + tl.arange(0, STOPS)) == token
    stopped = tl.max(is_stop.to(tl.int32), 0)
    ending = tl.where(stopped > 0, 1, (count + 1 >= tl.load(limits + slot)).to(tl.int32) * 2)
    ending = tl.where(is_running, ending, finished)
    tl.store(next_token + slot, token.to(tl.int64))
    tl.store(drawn + slot, count + is_running.to(tl.int32))
    tl.store(cached + slot, tl.load(cached + slot) + is_running.to(tl.int32))
    tl.store(done + slot, ending)


def draw_tokens(logits: Tensor, state: Slots, slots: Tensor) -> None:
    """Sample one token for each of `slots` from (slots, vocabulary) logits; finished rows are unchanged."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    stats = torch.empty(rows, blocks, 5, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    s = state
    _scan_vocabulary[(rows, blocks)](
        logits, slots, s.numbers, s.seeds, s.drawn, s.temperature, stats, choices,
        logits.stride(0), vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    _settle[(rows,)](
        stats, choices, slots, s.drawn, s.cached, s.limits, s.done, s.next_token,
        s.tokens, s.logprobs, s.entropies, s.stops, blocks, s.width,
        STOPS=len(s.stops), BLOCKS_PAD=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
