"""The engine on a GPU: compiled kernels, graphs, every precision, rows and turns that enter a running batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from e2e.tiny import (
    config_for,
    datums_of,
    learner_for,
    policy_for,
    random_prompts,
    write_model,
)
from inference_engine.kernel_checks import (
    CACHES,
    SHAPES,
    check_attention,
    check_drawing,
    check_endings,
    check_frequencies,
    check_logprobs,
    check_small_batch,
)

from retrain.capacity import sampling as sampling_rules
from retrain.capacity.sampling import blocks_for
from retrain.inference_engine import StreamingEngine, Turn
from retrain.inference_engine.pytorch import StreamingPyTorchEngine
from retrain.inference_engine.pytorch.ahead import compile_ahead
from retrain.inference_engine.pytorch.graphs import GraphDecoder
from retrain.modeling.packing import pack
from retrain.types import Completion, Sampling

from .conftest import engine_on

pytestmark = pytest.mark.gpu

LENGTHS = (4, 11, 37, 1)


def flat(groups: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [completion.token_ids_T.tolist() for group in groups for completion in group]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", CACHES)
def test_attention_is_that_of_plain_loops(shape: str, cache: str) -> None:
    from retrain.inference_engine.pytorch import kernels

    check_attention(kernels, shape, CACHES[cache], "cuda")


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "width"), [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (100, 512)])
def test_products_of_a_few_rows_are_exact_on_whole_numbers(rows: int, outputs: int, width: int) -> None:
    from retrain.inference_engine.pytorch import small_batch

    if torch.cuda.get_device_capability()[0] not in small_batch.GENERATIONS:
        pytest.skip("this GPU multiplies by cuBLAS")
    for _ in range(3):
        check_small_batch(small_batch, rows, outputs, width, "cuda")


def test_drawing_is_that_of_plain_loops() -> None:
    from retrain.inference_engine.pytorch import kernels

    check_drawing(kernels, "cuda")
    check_endings(kernels, "cuda")
    check_frequencies(kernels, "cuda", rows=5000, rounds=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_their_derivatives_are_those_of_plain_pytorch(dtype: torch.dtype) -> None:
    from retrain.modeling import logprob_kernels

    for vocabulary in (50_000, 151_936, 37):
        check_logprobs(logprob_kernels, vocabulary, dtype, "cuda")


def test_the_best_there_is_is_chosen_and_reported(broad: Path) -> None:
    engine = engine_on(policy_for(config_for(broad), device="cuda"), config_for(broad))
    assert engine.description == "pytorch on cuda, CUDA graphs, triton attention, bf16 unmerged weights, bf16 cache"
    assert isinstance(engine, StreamingEngine)
    flash = config_for(broad, inference__attention_kernel="flash")
    assert not isinstance(engine_on(policy_for(flash, device="cuda"), flash), StreamingEngine)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("cache", ["auto", "bf16", "fp8", "int8"])
def test_greedy_tokens_are_those_of_the_eager_decoder_on_the_cpu(family: str, cache: str, tmp_path: Path) -> None:
    config = config_for(write_model(tmp_path / "model", family), model__dtype="fp32", inference__kv_cache_dtype=cache)
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=24, temperature=1e-4)
    here, there = (
        engine_on(policy_for(config, device=device), config).generate(prompts, sampling) for device in ("cpu", "cuda")
    )
    agreeing = [a == b for a, b in zip(flat(here), flat(there), strict=True)]
    # Rounding to 16 or 8 bits may fall to either side of a tie, and a token apart is a completion apart.
    assert all(agreeing) if cache == "auto" else sum(agreeing) >= 3


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 2e-2),
        ({"attention_kernel": "flash"}, 2e-2),
        ({"kv_cache_dtype": "fp8"}, 5e-2),
        ({"kv_cache_dtype": "int8"}, 2e-2),
        ({"dtype": "fp8"}, 5e-2),
        ({"dtype": "fp8", "kv_cache_dtype": "fp8"}, 5e-2),
    ],
    ids=str,
)
def test_on_fresh_weights_the_mean_ratio_is_one(broad: Path, options: dict[str, str], tolerance: float) -> None:
    config = config_for(broad, training__temperature=1.0, **{f"inference__{k}": v for k, v in options.items()})
    policy = policy_for(config, device="cuda")
    learner, prompts = learner_for(policy, config), random_prompts(LENGTHS)
    learner.sampling = Sampling(max_tokens=64, n=8, temperature=1.0, seed=3)
    datums = datums_of(prompts, engine_on(policy, config).generate(prompts, learner.sampling))
    with torch.no_grad():
        packed = pack(datums, policy.device, with_history=False)
        ratios = (learner.logprobs(packed) - packed.sampled_logprobs).exp()
    print(options, "mean", float(ratios.mean()), "mean |log|", float(ratios.log().abs().mean()))
    assert float(ratios.mean()) == pytest.approx(1.0, abs=tolerance)


@pytest.mark.parametrize("stops", [2, 20_000])
def test_rows_that_wait_draw_the_same_as_in_one_big_batch(
    broad: Path, monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    config = config_for(broad, model__dtype="fp32")
    policy, prompts = policy_for(config, device="cuda"), random_prompts((4, 5, 6, 7, 8))
    monkeypatch.setattr(policy, "stop_ids", tuple(range(stops)))
    sampling = Sampling(max_tokens=40, n=8, seed=3)
    together = engine_on(policy, config).generate(prompts, sampling)
    monkeypatch.setattr(sampling_rules, "LARGEST", 11)
    assert flat(engine_on(policy, config).generate(prompts, sampling)) == flat(together)


class Script:
    def __init__(self, rounds: Sequence[Sequence[Turn]]) -> None:
        self.rounds = list(rounds)

    def take(self, wait: bool) -> list[Turn]:
        return list(self.rounds.pop(0)) if self.rounds else []


@pytest.mark.parametrize("share", [True, False])
def test_turns_draw_what_they_would_draw_alone(broad: Path, share: bool) -> None:
    config = config_for(broad, model__dtype="fp32", inference__prefix_caching=share)
    policy, prompts = policy_for(config, device="cuda"), random_prompts((4, 9, 700, 2, 6, 30))
    engine = engine_on(policy, config)
    assert isinstance(engine, StreamingPyTorchEngine)
    shared = Sampling(max_tokens=0, seed=0)
    turns = [Turn(p, replace(shared, seed=n, max_tokens=20 + 9 * n), Future()) for n, p in enumerate(prompts)]
    alone = [engine.generate([turn.prompt_ids], turn.sampling)[0][0] for turn in turns]
    engine.shutdown()
    engine.serve(Script([turns[:2], turns[2:3], [], turns[3:]]))
    for turn, expected in zip(turns, alone, strict=True):
        assert turn.answer.result(timeout=0).token_ids_T.tolist() == expected.token_ids_T.tolist()


def test_fifty_steps_take_no_more_memory_than_five(broad: Path) -> None:
    config = config_for(broad)
    policy = policy_for(config, device="cuda")
    engine, prompts, held = engine_on(policy, config), random_prompts(LENGTHS), []
    for step in range(50):
        engine.sync(policy)
        engine.generate(prompts, Sampling(max_tokens=20, n=4, seed=step))
        if step % 5 == 4:
            held.append(torch.cuda.memory_allocated())
    assert len(set(held)) == 1


@pytest.mark.alone
def test_on_a_card_that_is_nearly_full_rows_take_turns(broad: Path) -> None:
    config = config_for(broad)
    engine, prompts = engine_on(policy_for(config, device="cuda"), config), random_prompts((8, 9))
    engine.generate(prompts, Sampling(max_tokens=20, n=256))
    engine.shutdown()
    # As another process would: most of the GPU is taken, through no cache of this engine.
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    groups = engine.generate(prompts, Sampling(max_tokens=1500, n=256, seed=1))
    assert [len(group) for group in groups] == [256, 256]
    shape = engine.decoder.shape  # type: ignore[attr-defined]
    assert shape.blocks < 512 * blocks_for(1500)
    del taken
    torch.cuda.empty_cache()


def test_the_kernels_of_a_step_are_compiled_ahead(broad: Path) -> None:
    from retrain.inference_engine.pytorch import kernels, small_batch

    def compiled() -> dict[str, int]:
        launched = [kernels._attend, kernels._combine, kernels._scan_vocabulary, kernels._settle, small_batch._multiply]
        return {kernel.fn.__name__: len(kernel.device_caches[0][0]) for kernel in launched}

    engine = engine_on(policy_for(config_for(broad), device="cuda"), config_for(broad))
    assert isinstance(engine.decoder, GraphDecoder)
    wait(compile_ahead(engine.decoder.model, kernels, engine.decoder.cache_dtype))
    before = compiled()
    prompts = random_prompts(LENGTHS)
    for number in (1, 4, 40):
        engine.generate(prompts, Sampling(max_tokens=4, n=number))
    assert compiled() == before
    assert all(before[name] for name in ("_attend", "_scan_vocabulary", "_settle"))
