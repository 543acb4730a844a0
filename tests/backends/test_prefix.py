"""Prompts that stand once in a micro-batch for all their completions change no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.tiny import config_for, gradients, learner_for, policy_for, random_datums, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain.backends.local.learner import Learner
from retrain.modeling import prefix
from retrain.modeling.attention import PackedAttention, Scoring, causal_attention
from retrain.modeling.packing import BatchLoad, pack, split_by_tokens
from retrain.modeling.prefix import SharedPrefixAttention, TokenSpan
from retrain.types import Datum
from tests.fuzz import examples

CPU = torch.device("cpu")
# (prompt, its completions): a completion of one token feeds nothing of its own to the model.
GROUPS = ((7, (9, 1, 4)), (12, (3,)), (5, (6, 6)))


def group_datums(groups: Sequence[tuple[int, Sequence[int]]] = GROUPS) -> list[Datum]:
    """Datums of which several have one prompt, in an order that mixes the groups."""
    datums = []
    for seed, (prompt, completions) in enumerate(groups):
        group = random_datums([(prompt, length) for length in completions], seed=seed)
        datums += [replace(datum, prompt_ids=group[0].prompt_ids) for datum in group]
    return datums[::2] + datums[1::2]


def learner(model: Path, **overrides: Any) -> Learner:
    config = config_for(model, **overrides)
    return learner_for(policy_for(config), config)


def logprobs_and_gradients(
    made: Learner, batches: Sequence[Sequence[Datum]]
) -> tuple[list[Tensor], dict[str, Tensor], float]:
    totals = made._backward(batches)
    found = dict(gradients(made.policy))
    made.optimizer.clear()
    penalised = made.sampling.repetition_penalty != 1.0
    with torch.no_grad():
        logprobs = [made.logprobs(pack(batch, CPU, penalised)) for batch in batches]
    return logprobs, found, float(totals.metrics()["loss"] or 0.0)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral", "gpt2"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_logprobs_and_gradients_are_those_of_whole_sequences(family: str, penalty: float, tmp_path: Path) -> None:
    made = learner(write_model(tmp_path / "model", family), training__repetition_penalty=penalty, loss__ratio_cap=0.0)
    datums = group_datums()
    assert pack(datums, CPU, False).token_ids.shape[1] == 7 + 5 + (12 + 3 - 1) + (8 + 0 + 3) + (5 + 5)
    (together,), gradient, loss = logprobs_and_gradients(made, [datums])
    alone, expected, expected_loss = logprobs_and_gradients(made, [[datum] for datum in datums])
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, wanted in expected.items():
        scale = float(wanted.abs().max())
        torch.testing.assert_close(gradient[name], wanted, rtol=1e-4, atol=max(1e-6, 1e-5 * scale))


@pytest.mark.parametrize(
    "scoring",
    [Scoring(0.3), Scoring(0.3, window=4), Scoring(0.3, softcap=2.0), Scoring(0.3, window=4, softcap=2.0)],
    ids=["plain", "window", "softcap", "both"],
)
def test_attention_and_its_gradients_are_those_of_prompts_repeated(scoring: Scoring) -> None:
    check_shared_attention(scoring)


def test_long_sequences_one_by_one_and_short_ones_together_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[list[int]] = []

    def flash(
        query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], longest: Any, scale: float, window: int
    ) -> Tensor:
        lengths = [end.diff().tolist() for end in ends]
        together.append(lengths[1])
        parts = zip(
            *(x.split(n) for x, n in zip((query, key, value), (*lengths, lengths[1]), strict=True)), strict=True
        )
        return torch.cat([
            causal_attention(*(t.transpose(0, 1)[None] for t in part), Scoring(scale), len(part[1]) - len(part[0]))[0]
            .transpose(0, 1) for part in parts
        ])  # fmt: skip

    for name, value in {"LONG": 8, "LENGTH_STEP": 6, "flash_attention_varlen": flash}.items():
        monkeypatch.setattr(prefix, name, value)
    for name in ("can_flash", "can_use_cudnn"):
        monkeypatch.setattr(prefix, name, lambda *_: True)
    check_shared_attention(Scoring(0.3))
    assert together == [[3, 6], [5]]


def check_shared_attention(scoring: Scoring) -> None:
    generator = torch.Generator().manual_seed(0)
    # Two prompts of 3 and 6 tokens, then three completions of the first and one of the second.
    spans = [
        TokenSpan(0, 3),
        TokenSpan(3, 6),
        TokenSpan(9, 5, 0, 3),
        TokenSpan(14, 2, 0, 3),
        TokenSpan(16, 7, 0, 3),
    ]
    spans.append(TokenSpan(23, 4, 3, 6))
    heads, row = (4, 2, 2), 27
    shared = [torch.randn(row, h, 8, generator=generator, dtype=torch.float64).requires_grad_() for h in heads]
    index = torch.tensor([t for s in spans for t in (*range(s.prefix_start, s.prefix_start + s.prefix),
                                                         *range(s.start, s.start + s.length))])  # fmt: skip
    own = torch.tensor([i for s, end in zip(spans, np.cumsum([s.seen for s in spans]), strict=True)
                        for i in range(end - s.length, end)])  # fmt: skip
    wanted = torch.randn(1, 4, row, 8, generator=generator, dtype=torch.float64)

    def as_model(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)[None]

    output = SharedPrefixAttention(spans, CPU).attend(0, *map(as_model, shared), scoring)
    found = torch.autograd.grad((output * wanted).sum(), shared)
    plain = PackedAttention([s.seen for s in spans], CPU)
    repeated = plain.attend(0, *(as_model(tensor.index_select(0, index)) for tensor in shared), scoring)[:, :, own]
    expected = torch.autograd.grad((repeated * wanted).sum(), shared)
    torch.testing.assert_close(output, repeated, rtol=0, atol=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_prompts_are_repeated_where_sharing_saves_next_to_nothing() -> None:
    datums = group_datums([(1, (90, 90))])
    assert pack(datums, CPU, False).token_ids.shape[1] == 2 * 90


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    st.integers(1, 200),
    st.sampled_from([BatchLoad.fed, BatchLoad.padded]),
)
def test_every_datum_is_in_one_batch_and_a_group_is_cut_only_when_it_must_be(groups: Any, most: int, cost: Any) -> None:
    datums = group_datums(groups)
    batches = split_by_tokens(datums, most, cost)
    assert sorted(id(datum) for batch in batches for datum in batch) == sorted(map(id, datums))
    for batch in batches:
        by_prompt: dict[bytes, list[Datum]] = {}
        for datum in batch:
            by_prompt.setdefault(datum.prompt_ids.tobytes(), []).append(datum)
        load = [BatchLoad.of(group) for group in by_prompt.values()]
        total = load[0]
        for more in load[1:]:
            total = total + more
        assert cost(total) <= most or len(batch) == 1
        packed = pack(batch, CPU, with_history=False)
        assert packed.token_ids.shape[1] <= total.fed()
