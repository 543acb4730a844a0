"""Prompts that stand once in a micro-batch for all their completions change no number."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from e2e.tiny import config_for, gradients, learner_for, policy_for, random_datums, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain.backends.local.learner import Learner
from retrain.modeling import prefix
from retrain.modeling.attention import PackedAttention, Scoring, visible
from retrain.modeling.causal_lm import module_of
from retrain.modeling.compiling import varying_tokens
from retrain.modeling.packing import BatchLoad, pack, split_by_tokens
from retrain.modeling.prefix import SharedPrefixAttention, TokenSpan
from retrain.modeling.transformers_internals import compilable_layers
from retrain.types import Datum
from tests.cases import slow
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


class PlainAttention:
    """In place of a GPU's kernels: (ends of queries and keys), then anything, the scale, and the window."""

    used: ClassVar[list[str]] = []

    def __init__(self, name: str, ends: Any, longest: Any, scale: float, window: int = -1) -> None:
        self.used.append(name)
        self.scale, self.window = scale, window
        bounds = [end.tolist() for end in (ends if isinstance(ends, tuple) else (ends, ends))]
        assert all(longest_ >= max(np.diff(b)) for longest_, b in zip(np.broadcast_to(longest, 2), bounds, strict=True))
        self.parts = [tuple(slice(*b[at : at + 2]) for b in bounds) for at in range(len(bounds[0]) - 1)]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(heads, queries, keys), with -inf for the invisible ones."""
        positions = torch.arange(len(key))
        sees = visible(
            positions[len(key) - len(query) :, None], positions, None if self.window < 0 else self.window + 1
        )
        found = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        return found.masked_fill(~sees, float("-inf"))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        outputs, sums = [], []
        for q, k in self.parts:
            scores = self.scores(query[q], key[k].repeat_interleave(groups, 1))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k].repeat_interleave(groups, 1)))
            sums.append(scores.logsumexp(-1))
        return torch.cat(outputs), torch.cat(sums, 1).float()

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        found: list[list[Tensor]] = [[], [], []]
        for q, k in self.parts:
            keys, values = key[k].repeat_interleave(groups, 1), value[k].repeat_interleave(groups, 1)
            weights = (self.scores(query[q], keys) - logsumexp[:, q, None]).exp()
            inner = torch.einsum("qhd,khd->hqk", gradient[q], values)
            inner = weights * (inner - (gradient[q] * output[q]).sum(-1).T[:, :, None]) * self.scale
            found[0].append(torch.einsum("hqk,khd->qhd", inner, keys))
            for at, product in ((1, ("hqk,qhd->khd", inner, query[q])), (2, ("hqk,qhd->khd", weights, gradient[q]))):
                found[at].append(torch.einsum(*product).unflatten(1, (heads, groups)).sum(2))
        dq, dk, dv = map(torch.cat, found)
        return dq, dk, dv


class PlainCudnn:
    """The same for one sequence at a time, whose length is one of those that cuDNN is to see."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel(tensors).forward(*tensors)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert all(torch.isfinite(tensor).all() for tensor in tensors)
        return self.kernel(tensors).backward(*tensors)

    def kernel(self, tensors: Sequence[Tensor]) -> PlainAttention:
        (length,) = {len(tensor) for tensor in tensors if tensor.dim() == 3}
        assert length % prefix.LENGTH_STEP == 0
        return PlainAttention("cudnn", torch.tensor([0, length]), length, self.scale)


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attention as on a GPU, with plain kernels; returns the names of those that were used."""
    monkeypatch.setattr(PlainAttention, "used", [])
    monkeypatch.setattr(prefix, "FlashAttention", functools.partial(PlainAttention, "flash"))
    monkeypatch.setattr(prefix, "CudnnAttention", PlainCudnn)
    monkeypatch.setattr(prefix, "LONG", 8)
    monkeypatch.setattr(prefix, "LENGTH_STEP", 6)
    monkeypatch.setattr(prefix, "_has_flash", lambda *_: True)
    monkeypatch.setattr(prefix, "can_use_cudnn", lambda *_: True)
    return PlainAttention.used


@pytest.mark.parametrize("scoring", [Scoring(0.3), Scoring(0.3, window=4)], ids=["plain", "window"])
def test_the_operator_and_its_gradients_are_those_of_prompts_repeated(
    scoring: Scoring, plain_kernels: list[str]
) -> None:
    check_shared_attention(scoring)
    assert set(plain_kernels) == {"flash"}


def test_long_sequences_one_by_one_and_short_ones_together_give_the_same(plain_kernels: list[str]) -> None:
    lengths = (5, 2, 9, 4, 7)
    starts = np.cumsum([0, *lengths])
    check_shared_attention(Scoring(0.3), [TokenSpan(int(at), n) for at, n in zip(starts, lengths, strict=False)])
    assert plain_kernels == 2 * ["flash", "cudnn", "flash"]
    # The last one is padded.
    check_shared_attention(Scoring(0.3), [TokenSpan(0, 12), TokenSpan(12, 15)])
    assert plain_kernels[6:] == 4 * ["cudnn"]


def test_the_operator_keeps_its_attention_until_the_backward_pass(plain_kernels: list[str]) -> None:
    query, key, value = (torch.randn(1, heads, 7, 8, requires_grad=True) for heads in (4, 2, 2))
    attention = SharedPrefixAttention([TokenSpan(0, 3), TokenSpan(3, 4)], CPU)
    output = attention.attend(0, query, key, value, Scoring(0.3))
    gone = weakref.ref(attention)
    del attention
    gc.collect()
    assert gone() is not None
    output.sum().backward()
    del output
    gc.collect()
    assert query.grad is not None and query.grad.abs().max() > 0
    assert gone() is None


@pytest.mark.parametrize("recompute", slow(False, True), ids=["kept", "recomputed"])
def test_a_compiled_layer_is_one_graph_with_the_same_gradients(
    tiny: Path, plain_kernels: list[str], recompute: bool
) -> None:
    made = learner(tiny, loss__ratio_cap=0.0, memory__gradient_checkpointing=recompute)
    datums = group_datums()
    made._train_mode(True)

    def computed() -> dict[str, Tensor]:
        made.optimizer.clear()
        made.logprobs(made.pack(datums)).sum().backward()  # type: ignore[no-untyped-call]
        return {name: gradient.clone() for name, gradient in gradients(made.policy).items()}

    expected = computed()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        # The compiler looks at the GPU, which checkpointing does not allow within a layer if nobody has before.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in compilable_layers(module_of(made.policy.causal_lm)):
        layer.compile(backend=keep, fullgraph=True)
    made.policy.causal_lm.enable_input_require_grads()
    with varying_tokens(made.policy.causal_lm):
        found = computed()
    assert len(graphs) == 1
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted)
    # Other numbers of tokens use the same graph.
    datums = group_datums([(5, (9, 4)), (3, (30,))])
    assert computed() and len(graphs) == 1


# Two prompts of 3 and 6 tokens, then three completions of the first and one of the second.
SHARED = [
    TokenSpan(0, 3),
    TokenSpan(3, 6),
    TokenSpan(9, 5, 0, 3),
    TokenSpan(14, 2, 0, 3),
    TokenSpan(16, 7, 0, 3),
    TokenSpan(23, 4, 3, 6),
]


def check_shared_attention(scoring: Scoring, spans: Sequence[TokenSpan] = SHARED) -> None:
    generator = torch.Generator().manual_seed(0)
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
