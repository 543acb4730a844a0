"""What our kernels must do, on whatever device they run: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from scipy import stats

from retrain.inference_engine.pytorch.cache import FP8, Store
from retrain.inference_engine.pytorch.decoder import Row
from retrain.inference_engine.pytorch.paged import Group, PagedCache
from retrain.inference_engine.pytorch.slots import Slots
from retrain.modeling import logprobs
from retrain.modeling.attention import Scoring

from . import plain_kernels

# Rows, heads, key heads, head size, splits, window, softcap.
SHAPES = {
    "plain": (3, 4, 2, 32, 1, None, None),
    "split": (3, 4, 2, 32, 4, None, None),
    "odd size, a head each": (2, 2, 2, 24, 2, None, None),
    "window": (2, 4, 2, 32, 2, 50, None),
    "softcap": (2, 4, 1, 16, 2, None, 3.0),
}
CACHES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}


def check_attention(kernels: ModuleType, shape: str, cache_dtype: torch.dtype, device: str) -> None:
    """Attention and what it leaves in the cache, against loops; keys and values lie as slices of one product would."""
    rows, heads, key_heads, size, splits, window, softcap = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(rows, 1, heads + 2 * key_heads, size, generator=generator)
    if cache_dtype != torch.int8:
        # Triton's interpreter rounds to fewer bits towards zero; a GPU does not.
        fused = fused.to(cache_dtype).float()
    query, key, value = (part.transpose(1, 2) for part in fused.split([heads, key_heads, key_heads], dim=2))
    lengths = torch.tensor([5, 170, 0][:rows], dtype=torch.int32)
    cache = PagedCache(rows, 12, 200, cache_dtype, torch.device("cpu"))
    # Blocks out of order, and of another row in between.
    cache.free = [9, 1, 11, 4, 2, 10, 7, 3, 6]
    past = (torch.randn(rows, key_heads, 171, size, generator=generator) * 2 for _ in range(2))
    keys, values = past
    cache.fill(0, (keys, values), cache.place([Group(171, [row]) for row in range(rows)]))
    cache.upload()
    scoring = Scoring(size**-0.5, window, softcap)
    there = tuple(store.each(lambda part: part.clone().to(device)) for store in cache.layers[0])
    expected = plain_kernels.decode_attention(
        query, (key, value), cache.layers[0], cache.table, lengths, scoring, splits
    )
    assert isinstance(there[0], Store)
    got = kernels.decode_attention(
        query.to(device),
        (key.to(device), value.to(device)),
        there,
        cache.table.to(device),
        lengths.to(device),
        scoring,
        splits,
    )
    torch.testing.assert_close(got.cpu(), expected, atol=2e-4, rtol=1e-3)
    for held, wanted in zip(there, cache.layers[0], strict=True):
        for part, one in zip(held.parts, wanted.parts, strict=True):
            # Rounding to 8 bits may fall to either side of a tie.
            unequal = (part.cpu().float() - one.float()).abs() > 1e-6
            assert unequal.float().mean() < 1e-3


def slots_for(rows: int, limit: int, device: str, temperature: float, stops: tuple[int, ...] = ()) -> Slots:
    slots = Slots(rows, limit, stops, 0, torch.device(device))
    slots.temperature.fill_(temperature)
    slots.admit(slots.everyone, [Row(np.array([1]), 5, number, limit) for number in range(rows)])
    return slots


def check_drawing(kernels: ModuleType, device: str) -> None:
    """Log-probs, entropies, stops and limits; one row of the vocabulary is mostly cut."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9000, generator=generator) * 2
    logits[1, 100:8000] = float("-inf")
    slots = slots_for(6, 3, device, 0.7)
    at = torch.tensor([5, 0, 3, 2], device=device)
    kernels.draw_tokens(logits.to(device), slots, at)
    logprobs = (logits / 0.7).log_softmax(1)
    for row, slot in enumerate(at.tolist()):
        token = int(slots.tokens[slot, 0])
        assert int(slots.next_token[slot]) == token
        assert abs(float(slots.logprobs[slot, 0]) - float(logprobs[row, token])) < 1e-4
        entropy = float(torch.special.entr(logprobs[row].exp()).sum())
        assert abs(float(slots.entropies[slot, 0]) - entropy) < 1e-3
    assert slots.drawn.tolist() == [1, 0, 1, 1, 0, 1]
    assert slots.cached.tolist() == [1, 0, 1, 1, 0, 1]
    assert not 100 <= int(slots.tokens[0, 0]) < 8000


def check_endings(kernels: ModuleType, device: str) -> None:
    logits = torch.full((2, 50), -1e4)
    logits[0, 7] = logits[1, 8] = 0.0
    slots = slots_for(2, 2, device, 1.0, stops=(7, 11, 12))
    for _ in range(3):
        kernels.draw_tokens(logits.to(device), slots, slots.everyone)
    assert slots.done.tolist() == [1, 2]
    assert slots.drawn.tolist() == [1, 2]
    assert slots.tokens[1].tolist() == [8, 8]


def check_frequencies(kernels: ModuleType, device: str, rows: int = 400, rounds: int = 10) -> None:
    """Tokens come as often as their probabilities say."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 1.5
    counts = np.zeros(50)
    for number in range(rounds):
        slots = slots_for(rows, 1, device, 1.3)
        slots.seeds.fill_(number)
        kernels.draw_tokens(logits.expand(rows, 50).contiguous().to(device), slots, slots.everyone)
        counts += np.bincount(slots.tokens[:, 0].cpu().numpy(), minlength=50)
    expected = (logits / 1.3).double().softmax(0).numpy() * counts.sum()
    # Fewer than five expected draws say nothing: such tokens count together, if there are any.
    rare = expected < 5
    merged = [np.append(v[~rare], v[rare].sum() if rare.any() else []) for v in (counts, expected)]
    assert stats.chisquare(*merged).pvalue > 1e-3


def check_small_batch(small_batch: ModuleType, rows: int, outputs: int, width: int, device: str) -> None:
    """Products of a few rows with and without a bias; where sums are split, the counters are zero again."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(rows + outputs + 1, max(width, outputs), generator=generator)
    # Mostly zeros, and ones: sums are whole numbers below 256, which bf16 holds exactly.
    numbers = numbers.sign() * (numbers.abs() > 1.15)
    inputs, weight = numbers[:rows, :width].contiguous(), numbers[rows:-1, :width].contiguous()
    arrived = torch.zeros(small_batch.FEW_TILES, dtype=torch.int32, device=device)
    for bias in (None, numbers[-1, :outputs]):
        # Triton's interpreter does not multiply in bf16.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        given = [part.to(device, dtype) for part in (inputs, weight)]
        own = bias.to(device, dtype) if bias is not None else None
        found = small_batch.multiply(*given, own, arrived)
        expected = inputs.double() @ weight.double().T + (bias.double() if bias is not None else 0)
        assert torch.equal(found.cpu(), expected.to(dtype))
        assert not arrived.any()


def check_logprobs(kernels: ModuleType, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    """Against PyTorch; a padded vocabulary has logits of minus infinity, and a row may be almost certain."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocabulary, generator=generator) * 4
    logits[1, vocabulary - 5 :] = float("-inf")
    logits[2, 3] = 200.0
    targets = torch.tensor([0, 1, 3, vocabulary - 1, 2, 5])
    gradient = torch.randn(6, generator=generator)
    logits, targets, gradient = logits.to(device, dtype), targets.to(device), gradient.to(device)
    expected, normalizers = logprobs._normalize(logits, targets, 0.7)
    slopes = [logprobs._differentiate(logits, targets, normalizers, 0.7, given) for given in (None, gradient)]
    got, sums = kernels.normalize(logits, targets, 0.7)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sums, normalizers, atol=1e-4, rtol=1e-5)
    # Triton's interpreter rounds to fewer bits towards zero; a GPU does not.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 1e-2}
    for given, slope in zip((None, gradient), slopes, strict=True):
        overwritten = kernels.differentiate(logits.clone(), targets, sums, 0.7, given)
        torch.testing.assert_close(overwritten, slope, **tolerance)
