"""Triton kernels of the decode step: attention over the KV cache, and sampling from logits.

Both read what they need once. Attention of one token is bound by reading keys and values, so all query heads that share
a key head are served by one program; sampling is bound by reading logits, so the draw, its log-prob and the entropy of
the distribution come out of one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.backends.local.attention import Scoring

Caches = tuple[Tensor, Tensor]
# Wider than any context.
NO_WINDOW = 1 << 30
# Least extent of a matrix instruction; query heads of one group, and small heads, are padded to it.
MIN_ROWS = 16
# Vocabulary entries one program looks at.
VOCABULARY_BLOCK = 4096


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _attend(
    query, new_key, new_value, key_cache, value_cache, cached, output, partial_output, partial_stats,
    scale, window, softcap, query_row, query_head, new_row, new_head, cache_row, cache_head,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(cached + row)
    heads = tl.arange(0, ROWS)
    sizes = tl.arange(0, SIZE_PAD)
    is_head = heads < GROUP
    is_size = sizes < SIZE
    q_at = query + row * query_row + (head * GROUP + heads)[:, None] * query_head + sizes[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & is_size[None, :], other=0.0)

    first = tl.maximum(length + 1 - window, 0)
    per_split = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    start = first + split * per_split
    stop = tl.minimum(start + per_split, length)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, SIZE_PAD), tl.float32)
    base = row * cache_row + head * cache_head
    for at in range(start, stop, BLOCK):
        tokens = at + tl.arange(0, BLOCK)
        inside = tokens < stop
        offsets = base + tokens[:, None] * SIZE + sizes[None, :]
        k = tl.load(key_cache + offsets, mask=inside[:, None] & is_size[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(value_cache + offsets, mask=inside[:, None] & is_size[None, :], other=0.0).to(q.dtype)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best

    if split == SPLITS - 1:
        # The token itself: it is not in the cache yet, so it is attended to from registers and then stored.
        new_at = row * new_row + head * new_head + sizes
        k_new = tl.load(new_key + new_at, mask=is_size, other=0.0)
        v_new = tl.load(new_value + new_at, mask=is_size, other=0.0)
        own = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        if CAPPED:
            own = softcap * _tanh(own / softcap)
        new_best = tl.maximum(best, own)
        shrink = tl.exp(best - new_best)
        weight = tl.exp(own - new_best)
        total = total * shrink + weight
        gathered = gathered * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        best = new_best
        slot = base + length * SIZE + sizes
        tl.store(key_cache + slot, k_new.to(key_cache.dtype.element_ty), mask=is_size)
        tl.store(value_cache + slot, v_new.to(value_cache.dtype.element_ty), mask=is_size)

    rows_at = (row * HEADS + head) * GROUP + heads
    if SPLITS == 1:
        result = gathered / total[:, None]
        out_at = output + rows_at[:, None] * SIZE + sizes[None, :]
        tl.store(out_at, result.to(output.dtype.element_ty), mask=is_head[:, None] & is_size[None, :])
    else:
        part = rows_at * SPLITS + split
        tl.store(partial_stats + part * 2, best, mask=is_head)
        tl.store(partial_stats + part * 2 + 1, total, mask=is_head)
        part_at = partial_output + part[:, None] * SIZE + sizes[None, :]
        tl.store(part_at, gathered, mask=is_head[:, None] & is_size[None, :])


@triton.jit
def _combine(partial_output, partial_stats, output, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    sizes = tl.arange(0, SIZE_PAD)
    best = tl.load(partial_stats + (row * SPLITS + splits) * 2)
    total = tl.load(partial_stats + (row * SPLITS + splits) * 2 + 1)
    shrink = tl.exp(best - tl.max(best, 0))
    at = (row * SPLITS + splits)[:, None] * SIZE + sizes[None, :]
    gathered = tl.load(partial_output + at, mask=(sizes < SIZE)[None, :], other=0.0)
    result = tl.sum(gathered * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(output + row * SIZE + sizes, result.to(output.dtype.element_ty), mask=sizes < SIZE)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, caches: Caches, cached: Tensor, scoring: Scoring, splits: int
) -> Tensor:
    """Attention of one new token a row over its cache, which it then joins.

    query (rows, heads, 1, size); key, value (rows, key heads, 1, size); caches (rows, key heads, capacity, size);
    `cached` tokens of each row count, the new one not among them.
    """
    rows, heads, _, size = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    output = torch.empty(rows, heads, 1, size, dtype=query.dtype, device=query.device)
    parts = rows * heads * splits if splits > 1 else 1
    partial_output = torch.empty(parts, size, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(parts, 2, dtype=torch.float32, device=query.device)
    keys, values = caches
    pad = max(MIN_ROWS, triton.next_power_of_2(size))
    _attend[(rows, key_heads, splits)](
        query, key, value, keys, values, cached, output, partial_output, partial_stats,
        scoring.scale, NO_WINDOW if scoring.window is None else scoring.window, scoring.softcap or 1.0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), keys.stride(0), keys.stride(1),
        GROUP=group, SIZE=size, SIZE_PAD=pad, ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK=64, SPLITS=splits, HEADS=key_heads, CAPPED=scoring.softcap is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](
            partial_output, partial_stats, output, SIZE=size, SIZE_PAD=pad, SPLITS=splits, num_warps=2
        )
    return output


@triton.jit
def _scan_vocabulary(
    logits,
    row_ids,
    first_row,
    drawn,
    seed,
    temperature,
    stats,
    choices,
    logits_row,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    x = tl.load(logits + row * logits_row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature)
    most = tl.max(x, 0)
    # A block may hold nothing but filtered tokens; then its weights are all zero, not NaN.
    floor = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(x - floor)
    finite = tl.where(x == float("-inf"), 0.0, x)

    # An exponential race: the token whose exponential, over its probability, comes first is a fair draw. Counters are
    # (token, row, position), so a row draws the same whatever batch it sits in. One call makes four numbers.
    quarter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    which = quarter * 0 + (tl.load(row_ids + row) + tl.load(first_row)).to(tl.uint32)
    position = quarter * 0 + tl.load(drawn + row).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), quarter, which, position, quarter * 0)
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


@triton.jit
def _settle(
    stats, choices, row_ids, drawn, cached, done, next_token,
    out_tokens, out_logprobs, out_entropies, out_lengths, out_endings, stops, blocks, width,
    STOPS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
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
    normaliser = top + tl.log(total)

    finished = tl.load(done + row)
    count = tl.load(drawn + row)
    number = tl.load(row_ids + row).to(tl.int64)
    place = number * width + count
    going_on = finished == 0
    tl.store(out_tokens + place, token, mask=going_on)
    tl.store(out_logprobs + place, chosen - normaliser, mask=going_on)
    tl.store(out_entropies + place, normaliser - weighted / total, mask=going_on)
    is_stop = tl.load(stops + tl.arange(0, STOPS)) == token
    stopped = tl.max(is_stop.to(tl.int32), 0)
    tl.store(next_token + row, token.to(tl.int64))
    step = going_on.to(tl.int32)
    tl.store(drawn + row, count + step)
    tl.store(cached + row, tl.load(cached + row) + step)
    ending = tl.where(stopped > 0, 1, (count + 1 >= width).to(tl.int32) * 2)
    tl.store(done + row, tl.where(going_on, ending, finished))
    tl.store(out_lengths + number, count + 1, mask=going_on)
    tl.store(out_endings + number, ending, mask=going_on)


class SamplingBuffers:
    """Where drawn tokens go, and how far each row is.

    `done` and `endings` are 0 while a row goes on, 1 after a stop token, 2 at the cap. Rows may change places in the
    batch; what they draw is written under `row_ids`, the number they began with. `first_row` is how many rows of the
    same request were drawn in batches before this one, so that cutting a request into batches changes no draw.
    """

    def __init__(self, rows: int, width: int, stops: tuple[int, ...], device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.width = width
        self.tokens = zeros(rows, width)
        self.logprobs = zeros(rows, width, dtype=torch.float32)
        self.entropies = zeros(rows, width, dtype=torch.float32)
        self.lengths, self.endings = zeros(rows), zeros(rows)
        self.row_ids, self.drawn, self.cached, self.done = zeros(rows), zeros(rows), zeros(rows), zeros(rows)
        self.next_token = zeros(rows, dtype=torch.int64)
        self.seed, self.first_row = zeros(1), zeros(1)
        self.temperature = zeros(1, dtype=torch.float32)
        padding = (-1,) * (triton.next_power_of_2(len(stops)) - len(stops)) if stops else (-1,)
        self.stops = torch.tensor((*stops, *padding), dtype=torch.int32, device=device)


def draw_tokens(logits: Tensor, buffers: SamplingBuffers) -> None:
    """Draw one token a row of (rows, vocabulary) logits and take note of it; rows that are done stay as they are."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    stats = torch.empty(rows, blocks, 5, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    b = buffers
    _scan_vocabulary[(rows, blocks)](
        logits, b.row_ids, b.first_row, b.drawn, b.seed, b.temperature, stats, choices,
        logits.stride(0), vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    _settle[(rows,)](
        stats, choices, b.row_ids, b.drawn, b.cached, b.done, b.next_token,
        b.tokens, b.logprobs, b.entropies, b.lengths, b.endings, b.stops, blocks, b.width,
        STOPS=len(b.stops), BLOCKS_PAD=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
