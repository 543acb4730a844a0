"""Rows that enter and leave a running batch, and turns served from it; plain loops stand in for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from e2e.tiny import CONTEXT, PlainTokenizer, random_prompts

from retrain.capacity import sampling as sampling_rules
from retrain.config.schema import Inference
from retrain.errors import RolloutError
from retrain.inference_engine import StreamingEngine, Turn
from retrain.inference_engine.pytorch import (
    PyTorchEngine,
    StreamingPyTorchEngine,
    batch_shape,
    build,
    cache,
    choice,
    graphs,
    paged,
)
from retrain.inference_engine.pytorch.ahead import compile_ahead
from retrain.inference_engine.pytorch.decoder import Row
from retrain.inference_engine.pytorch.graphs import GraphDecoder
from retrain.inference_engine.pytorch.paged import PagedCache
from retrain.types import Completion, Sampling
from tests.cases import slow

from . import plain_kernels
from .conftest import Rig
from .plain import plain_distributions

Make = Callable[..., StreamingPyTorchEngine]
SAMPLING = Sampling(max_tokens=12, n=3, temperature=1.2, seed=4)


@pytest.fixture
def running(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines whose batch runs as on a GPU."""
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    monkeypatch.setattr(choice, "load_kernels", lambda: plain_kernels)
    monkeypatch.setattr(choice, "_computes_in_fp8", lambda device: True)
    monkeypatch.setattr(graphs, "SMALLEST", 2)
    monkeypatch.setattr(batch_shape, "SMALLEST", 2)
    monkeypatch.setattr(graphs, "POLL_EVERY", 3)

    def make(**options: Any) -> StreamingPyTorchEngine:
        engine = build(llama.policy, Inference(**options), PlainTokenizer(), lambda *_: None)
        assert isinstance(engine, StreamingPyTorchEngine)
        return engine

    return make


def decoder_of(engine: PyTorchEngine) -> GraphDecoder:
    return cast(GraphDecoder, engine.decoder)


def flat(groups: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [completion.token_ids_T.tolist() for group in groups for completion in group]


class Script:
    """Turns that come a few at a time; what is asked next may depend on an answer."""

    def __init__(self, rounds: Sequence[Sequence[Turn]]) -> None:
        self.rounds = list(rounds)
        self.waited: list[bool] = []

    def take(self, wait: bool) -> list[Turn]:
        self.waited.append(wait)
        return list(self.rounds.pop(0)) if self.rounds else []


def turn(prompt: np.ndarray, seed: int, max_tokens: int = 8) -> Turn:
    return Turn(prompt, replace(SAMPLING, n=1, seed=seed, max_tokens=max_tokens), Future())


def test_only_an_engine_with_a_running_batch_serves_turns(llama: Rig, running: Make) -> None:
    assert isinstance(running(), StreamingEngine)
    assert not isinstance(llama.engine, StreamingEngine)


@pytest.mark.parametrize("cache_dtype", ["auto", "bf16", "fp8", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_greedy_tokens_are_those_of_the_eager_decoder(
    llama: Rig, running: Make, cache_dtype: str, temperature: float
) -> None:
    greedy, prompts = Sampling(max_tokens=10, temperature=temperature), random_prompts((4, 11, 1))
    options = Inference(kv_cache_dtype=cache_dtype, attention_kernel="flash")
    eager = PyTorchEngine(llama.policy, options, PlainTokenizer(), lambda *_: None)
    ours, theirs = (e.generate(prompts, greedy) for e in (running(kv_cache_dtype=cache_dtype), eager))
    assert flat(ours) == flat(theirs)


def test_a_greedy_batch_between_others_changes_nothing_of_them(running: Make) -> None:
    engine, prompts = running(), random_prompts((4, 11))
    before = engine.generate(prompts, SAMPLING)
    greedy = engine.generate(prompts, replace(SAMPLING, temperature=0.0))
    assert all(one.token_ids_T.tolist() == group[0].token_ids_T.tolist() for group in greedy for one in group)
    assert flat(engine.generate(prompts, SAMPLING)) == flat(before)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}],
    ids=["nothing", "all together"],
)
def test_logprobs_are_those_of_the_slow_version(llama: Rig, running: Make, options: dict[str, Any]) -> None:
    prompts, sampling = random_prompts((4, 9)), replace(SAMPLING, **options)
    for prompt, group in zip(prompts, running().generate(prompts, sampling), strict=True):
        for completion in group:
            tokens = completion.token_ids_T
            expected = plain_distributions(llama.plain, prompt, tokens, sampling)
            chosen = [distribution[token] for distribution, token in zip(expected, tokens, strict=True)]
            np.testing.assert_allclose(completion.logprobs_T, np.log(chosen), atol=1e-3)


def test_rows_that_wait_draw_the_same_as_in_one_big_batch(
    llama: Rig, running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.policy, "stop_ids", tuple(range(2, 20)))
    prompts = random_prompts((5, 9, 3, 7))
    together = running().generate(prompts, SAMPLING)
    monkeypatch.setattr(batch_shape, "LARGEST", 5)
    engine = running()
    entered: list[int] = []
    prefill = graphs.prefill
    monkeypatch.setattr(
        graphs, "prefill", lambda m, c, groups, w: (entered.append(sum(map(len, groups))), prefill(m, c, groups, w))[1]
    )
    assert flat(engine.generate(prompts, SAMPLING)) == flat(together)
    assert entered[0] == 5
    assert len(entered) > 3, "rows enter as others finish, not in whole waves"
    assert sum(entered) == 12


def test_a_batch_that_shrinks_to_smaller_graphs_draws_the_same(
    llama: Rig, running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.policy, "stop_ids", tuple(range(2, 20)))
    engine, prompts, sizes = running(), random_prompts((5, 9, 3)), []
    body = GraphDecoder._body
    monkeypatch.setattr(GraphDecoder, "_body", lambda self, size: (sizes.append(size), body(self, size))[1])
    shrinking = engine.generate(prompts, SAMPLING)
    assert len(set(sizes)) > 1
    monkeypatch.setattr(graphs, "bucket", lambda rows, largest: largest)
    assert flat(running().generate(prompts, SAMPLING)) == flat(shrinking)


def test_turns_draw_what_they_would_draw_alone(running: Make) -> None:
    engine, prompts = running(), random_prompts((4, 9, 30, 2, 6))
    turns = [turn(prompt, seed=number, max_tokens=3 + 2 * number) for number, prompt in enumerate(prompts)]
    alone = [engine.generate([t.prompt_ids], t.sampling)[0][0] for t in turns]
    script = Script([turns[:2], [], turns[2:4], turns[4:]])
    running().serve(script)
    for t, expected in zip(turns, alone, strict=True):
        got = t.answer.result(timeout=0)
        assert got.token_ids_T.tolist() == expected.token_ids_T.tolist()
        np.testing.assert_allclose(got.logprobs_T, expected.logprobs_T, atol=1e-4)
        assert len(got.token_ids_T) <= t.sampling.max_tokens
    assert script.waited[0], "with nothing to do it waits"
    assert not script.waited[1], "while it samples it does not"


def test_a_turn_is_answered_while_others_continue(running: Make) -> None:
    short, long = turn(random_prompts((4,))[0], 1, max_tokens=2), turn(random_prompts((5,))[0], 2, max_tokens=40)
    answered: list[bool] = []

    class Watching(Script):
        def take(self, wait: bool) -> list[Turn]:
            answered.append(short.answer.done() and not long.answer.done())
            return super().take(wait)

    running().serve(Watching([[short, long]]))
    assert any(answered)
    assert long.answer.done()


def test_a_longer_turn_makes_the_running_batch_grow(running: Make) -> None:
    first, second = turn(random_prompts((4,))[0], 1, max_tokens=20), turn(random_prompts((200,))[0], 2, max_tokens=30)
    engine = running()
    engine.serve(Script([[first], [second]]))
    shape = decoder_of(engine).shape
    assert shape is not None
    assert shape.capacity >= 230
    alone = [running().generate([t.prompt_ids], t.sampling)[0][0] for t in (first, second)]
    for t, expected in zip((first, second), alone, strict=True):
        assert t.answer.result(timeout=0).token_ids_T.tolist() == expected.token_ids_T.tolist()


def test_a_turn_for_which_memory_cannot_grow_waits_until_the_others_are_done(
    running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "blocks_that_fit", lambda *_: 5)
    turns = [turn(prompt, n, max_tokens=9) for n, prompt in enumerate(random_prompts((4, 5, 200)))]
    engine = running()
    engine.serve(Script([turns[:2], turns[2:]]))
    assert all(t.answer.done() for t in turns)


def test_a_turn_beyond_the_context_is_answered_with_the_error(running: Make) -> None:
    good, bad = turn(random_prompts((4,))[0], 1), turn(random_prompts((CONTEXT,))[0], 2)
    running().serve(Script([[bad, good]]))
    assert good.answer.done()
    with pytest.raises(RolloutError, match=f"{CONTEXT} tokens; the context holds"):
        bad.answer.result(timeout=0)


def test_sampling_that_broke_off_leaves_no_rows_behind(running: Make) -> None:
    engine, prompts = running(), random_prompts((4, 5))
    expected = flat(engine.generate(prompts, SAMPLING))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, SAMPLING)
    engine.progress = lambda *_: None
    assert flat(engine.generate(prompts, SAMPLING)) == expected


def test_buffers_are_made_once_for_requests_of_one_shape(running: Make) -> None:
    engine, prompts = running(), random_prompts((4, 5))
    engine.generate(prompts, SAMPLING)
    slots = decoder_of(engine).slots
    engine.generate(prompts, replace(SAMPLING, seed=9, temperature=0.5, top_p=0.9))
    assert decoder_of(engine).slots is slots
    engine.shutdown()
    assert decoder_of(engine).cache is None


class Gpu:
    """As much of torch.cuda as the memory arithmetic asks."""

    def __init__(self, free: int) -> None:
        self.free = free

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 1 << 40

    def memory_reserved(self, device: torch.device) -> int:
        return 3000

    def memory_allocated(self, device: torch.device) -> int:
        return 1000


def test_batch_sizes_follow_free_memory(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 layers × 2 key heads × 8 numbers × keys and values: 96 numbers a token, 12 scales with int8.
    assert cache.bytes_per_token(llama.policy, torch.float32) == 384
    assert cache.bytes_per_token(llama.policy, cache.FP8) == 96
    assert cache.bytes_per_token(llama.policy, torch.int8) == 96 + 48
    monkeypatch.setattr(llama.policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch, "cuda", Gpu(free=100_000))
    # Three quarters of 100 000 free, 2 000 reserved but unused and 40 000 held, over 128 tokens × 384 bytes.
    assert cache.free_memory(llama.policy.device) == 102_000
    assert cache.rows_that_fit(llama.policy, 100, torch.float32, 102_000 + 40_000) == 2
    with pytest.raises(RolloutError, match=r"1024 tokens × 0 KiB per token = 0.00 GiB, and the cache may take 0.00"):
        cache.rows_that_fit(llama.policy, 1000, torch.float32, 102_000)


@pytest.mark.slow
def test_a_new_process_with_more_free_memory_runs_as_many_rows_at_once(
    running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "blocks_that_fit", lambda policy, rows, tokens, dtype, room: room // 1000)
    monkeypatch.setattr(graphs, "free_memory", lambda device: 5000)
    prompts = random_prompts((5, 9, 3, 7))
    before = running()
    before.generate(prompts, SAMPLING)
    sizes = before.sizes()
    monkeypatch.setattr(graphs, "free_memory", lambda device: 100_000)
    after, fresh = running(), running()
    assert after.restore_sizes(sizes)
    blocks = []
    for engine in (before, after, fresh):
        engine.generate(prompts, SAMPLING)
        shape = decoder_of(engine).shape
        assert shape is not None
        blocks.append(shape.blocks)
    assert blocks == [5, 5, 25], "12 rows of one block each, one more for each of them, and the scratch block"


def test_sizes_that_do_not_fit_any_more_are_not_taken_over(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    before.generate(random_prompts((5, 9, 3, 7)), SAMPLING)
    monkeypatch.setattr(graphs, "blocks_that_fit", lambda *_: 5)
    assert not running().restore_sizes(before.sizes())


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling_rules, paged, batch_shape, graphs, plain_kernels):
        monkeypatch.setattr(module, "BLOCK", 8)


def test_a_cache_that_runs_out_grows_before_rows_make_room(
    llama: Rig, running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.policy, "stop_ids", ())
    use_small_blocks(monkeypatch)
    prompts, sampling = random_prompts((1, 8, 5)), replace(SAMPLING, max_tokens=40, n=2)
    together = running().generate(prompts, sampling)
    # Memory for fewer blocks than all rows need at their limits, one spare block each included.
    monkeypatch.setattr(graphs, "blocks_that_fit", lambda *_: 38)
    allocated: list[int] = []
    allocate = GraphDecoder._allocate
    monkeypatch.setattr(
        GraphDecoder, "_allocate", lambda self, shape: (allocated.append(shape.blocks), allocate(self, shape))[1]
    )
    swapped: list[object] = []
    monkeypatch.setattr(GraphDecoder, "_swap_out", lambda self, row, slot: swapped.append(row))
    assert flat(running().generate(prompts, sampling)) == flat(together)
    assert allocated == [int(38 * sampling_rules.FIRST_SHARE / sampling_rules.CACHE_SHARE), 38]
    assert not swapped


def test_when_memory_is_taken_away_the_batch_begins_again_in_less_of_it(
    running: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts((5, 9, 3, 7))
    expected = running().generate(prompts, SAMPLING)
    engine, failures, step = running(), [3, 5], GraphDecoder._step

    def fail_sometimes(self: GraphDecoder) -> None:
        failures[0] -= 1
        if failures[0] == 0:
            failures.pop(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self)

    failures.append(1 << 30)
    monkeypatch.setattr(GraphDecoder, "_step", fail_sometimes)
    assert flat(engine.generate(prompts, SAMPLING)) == flat(expected)
    assert len(failures) == 1, "both errors were raised"
    assert decoder_of(engine).room == cache.free_memory(torch.device("cpu")) // 2 // 2


def test_out_of_memory_again_and_again_ends_the_run(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GraphDecoder) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GraphDecoder, "_step", fail)
    with pytest.raises(RolloutError, match=r"out of GPU memory while sampling, even in .* does another process"):
        running().generate(random_prompts((5, 9)), SAMPLING)


@pytest.mark.parametrize("cache_dtype", ["auto", *slow("int8")])
@pytest.mark.parametrize("blocks", [5, *slow(8, 12)])
def test_rows_that_make_room_for_others_draw_the_same(
    llama: Rig, running: Make, monkeypatch: pytest.MonkeyPatch, blocks: int, cache_dtype: str
) -> None:
    monkeypatch.setattr(llama.policy, "stop_ids", ())
    use_small_blocks(monkeypatch)
    prompts = random_prompts((1, 8, 5))
    sampling = replace(SAMPLING, max_tokens=20, n=2, repetition_penalty=1.1)
    together = running(kv_cache_dtype=cache_dtype).generate(prompts, sampling)
    monkeypatch.setattr(graphs, "blocks_that_fit", lambda *_: blocks)
    swapped: list[int] = []
    swap_out = GraphDecoder._swap_out
    monkeypatch.setattr(
        GraphDecoder, "_swap_out", lambda self, row, slot: (swapped.append(slot), swap_out(self, row, slot))[1]
    )
    engine = running(kv_cache_dtype=cache_dtype)
    few = engine.generate(prompts, sampling)
    assert flat(few) == flat(together)
    for one, other in zip(few, together, strict=True):
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_allclose(mine.logprobs_T, its.logprobs_T, atol=1e-5)
    assert swapped or blocks == 5, "with 5 blocks only one row runs at a time"
    held = decoder_of(engine).cache
    assert held is not None
    assert sorted(held.free) == list(range(1, blocks)) and not any(held.users), "every block is free again"


def test_completions_of_a_prompt_share_its_full_blocks(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    upload = PagedCache.upload
    monkeypatch.setattr(PagedCache, "upload", lambda self: (most.append(sum(map(bool, self.users))), upload(self))[1])
    sampling = replace(SAMPLING, max_tokens=4, n=6)
    shared = running().generate(random_prompts((140,)), sampling)
    # 140 tokens: two full blocks, and a third for each completion.
    assert max(most) == 2 + 6
    most.clear()
    alone = running(prefix_caching=False).generate(random_prompts((140,)), sampling)
    assert max(most) == 3 * 6
    assert flat(shared) == flat(alone)


@pytest.mark.slow
def test_the_completions_of_a_prompt_are_delivered_while_others_are_sampled(running: Make) -> None:
    engine, prompts = running(), random_prompts((5, 9, 3, 7, 2, 4, 6, 8))
    sampling = replace(SAMPLING, max_tokens=100, n=1, temperature=3.0)
    expected = engine.generate(prompts, sampling)
    longest = [max(len(completion.token_ids_T) for completion in group) for group in expected]
    assert len(set(longest)) > 1, "the test needs prompts that end at different times"
    delivered: dict[int, list[Completion]] = {}
    busy = []

    def deliver(at: int, completions: list[Completion]) -> None:
        assert not torch.is_inference_mode_enabled(), "the receiver may train"
        delivered[at] = completions
        busy.append(decoder_of(engine).is_busy)

    groups = engine.generate_each(prompts, sampling, deliver)
    assert flat(groups) == flat(expected)
    assert delivered == dict(enumerate(groups))
    assert busy[0] and not busy[-1]
    assert [longest[at] // graphs.POLL_EVERY for at in delivered] == sorted(n // graphs.POLL_EVERY for n in longest)


@pytest.mark.slow
def test_a_batch_keeps_its_memory_while_another_thread_trains(running: Make) -> None:
    engine, prompts = running(), random_prompts((5, 9, 3))
    sampling = replace(SAMPLING, max_tokens=100, n=1, temperature=3.0)
    expected = engine.generate(prompts, sampling)
    # Training that is short of memory asks for it; the rows that still run must not lose theirs.
    groups = engine.generate_each(prompts, sampling, lambda at, completions: engine.release_memory())
    assert flat(groups) == flat(expected)
    engine.release_memory()
    assert decoder_of(engine).slots is None


def test_while_no_completion_is_done_nothing_is_decoded(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainTokenizer.batch_decode
    # As in transformers 5.17.
    monkeypatch.setattr(PlainTokenizer, "batch_decode", lambda *args, **more: plain(*args, **more) or [""])
    one = turn(random_prompts((5,))[0], seed=1, max_tokens=30)
    running().serve(Script([[one]]))
    assert len(one.answer.result().token_ids_T)


class Recorder:
    """Notes what a kernel is compiled for: everything of its inputs but the number of rows."""

    def __init__(self) -> None:
        self.launches: set[tuple[object, ...]] = set()

    def decode_attention(self, query: Any, pair: Any, stores: Any, *rest: Any) -> Any:
        held = [(part.dtype, part.shape[1:]) for store in stores for part in store.parts]
        is_split = rest[-1] > 1
        self.launches.add(("attention", query.dtype, query.shape[1:], pair[0].shape[1:], str(held), is_split))
        return plain_kernels.decode_attention(query, pair, stores, *rest)

    def draw_tokens(self, logits: Any, state: Any, slots: Any) -> None:
        self.launches.add(("sampling", logits.dtype, logits.shape[1], slots.dtype, len(state.stops)))
        plain_kernels.draw_tokens(logits, state, slots)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", *slow("bf16", "fp8", "int8")])
def test_the_kernels_of_a_step_are_compiled_ahead(llama: Rig, running: Make, cache_dtype: str) -> None:
    decoder = decoder_of(running(kv_cache_dtype=cache_dtype))
    ahead, used = Recorder(), Recorder()
    for future in compile_ahead(decoder.model, ahead, decoder.cache_dtype):
        future.result()
    decoder.kernels = used
    decoder.warm_up()
    decoder.draw([Row(np.array([1]), 0, row, 3) for row in range(600)], Sampling(max_tokens=3), lambda *_: None)
    assert used.launches == ahead.launches
    assert len(used.launches) == 3
