"""The learner's memory plan, on a pretended GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny import config_for, gradients, learner_for, policy_for, random_datums, write_model

from retrain.backends.local.memory import StepMemory
from retrain.capacity.memory import SPARE, TrainingCost, read_shape
from retrain.config.schema import Memory

TOTAL = 100 << 30


@dataclass
class Gpu:
    """Numbers that torch.cuda would give."""

    free: int = TOTAL
    allocated: int = 0
    peak: int = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    card = Gpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card.allocated)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: card.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: card.peak)
    return card


def memory_of(model: Path, logged: list[str], **options: Any) -> StepMemory:
    """The plan of a learner that believes to be on a GPU, for a model as wide as a real one."""
    memory = StepMemory(policy_for(config_for(model)), Memory(**options), logged.append)
    shape = read_shape(
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128_256}
    )
    assert shape is not None
    memory.cost = TrainingCost(shape, rank=32, width=2)
    memory.micro_batch_tokens = 9216
    return memory


def test_where_there_is_room_nothing_is_recomputed_and_one_line_says_so(tiny: Path, gpu: Gpu) -> None:
    memory = memory_of(tiny, logged := [])
    memory.prepare(600)
    assert (memory.micro_batch_tokens, memory.recomputed_layers) == (9216, 0)
    memory.prepare(600)
    memory.prepare(700)
    assert len(logged) == 1
    assert logged[0].startswith("Memory plan: micro-batches of 9216 tokens, none of 3 layers recomputed: about ")


def test_long_sequences_are_trained_two_at_a_time_where_there_is_room(tiny: Path, gpu: Gpu) -> None:
    memory = memory_of(tiny, [])
    memory.prepare(7000)
    assert memory.micro_batch_tokens == 14000
    memory.prepare(12_000)
    assert memory.micro_batch_tokens == 18432
    memory.prepare(20_000)
    assert memory.micro_batch_tokens == 20_000


def test_memory_that_is_gone_is_none_and_not_less_than_none(tiny: Path, gpu: Gpu) -> None:
    gpu.free = 0
    memory = memory_of(tiny, logged := [])
    memory.prepare(600, pending=7 << 30)
    assert "0.0 GiB free." in logged[0] and "-" not in logged[0].replace("micro-batches", "")
    assert "0.0 GiB are free" in memory.explain(600) and "-" not in memory.explain(600)


def test_layers_are_recomputed_only_as_far_as_memory_asks(tiny: Path, gpu: Gpu) -> None:
    found = []
    for gigabytes in (10, 1.9, 1.5, 1.2):
        gpu.free = int(gigabytes * 1e9 / (1 - SPARE))
        memory = memory_of(tiny, [])
        memory.prepare(600)
        found.append(memory.recomputed_layers)
        assert memory.micro_batch_tokens >= 600
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 3


def test_a_longer_sequence_is_planned_for_when_it_comes(tiny: Path, gpu: Gpu) -> None:
    gpu.free = int(3e9 / (1 - SPARE))
    memory = memory_of(tiny, logged := [])
    memory.prepare(600)
    before = memory.recomputed_layers
    memory.prepare(12_000)
    assert memory.micro_batch_tokens >= 12_000
    assert memory.recomputed_layers > before
    assert len(logged) == 2


def test_a_micro_batch_that_needs_more_than_thought_changes_the_plan(tiny: Path, gpu: Gpu) -> None:
    gpu.free = int(4e9 / (1 - SPARE))
    memory = memory_of(tiny, logged := [])
    memory.prepare(600)
    assert memory.cost is not None
    tokens, estimate = memory.micro_batch_tokens, memory.cost.bytes(memory.micro_batch_tokens)
    with memory.watch(tokens):
        gpu.peak = 2 * estimate
    assert memory.cost.correction == pytest.approx(2, rel=0.2)
    assert memory.micro_batch_tokens < tokens or memory.recomputed_layers > 0
    assert len(logged) == 2
    # What was measured once is settled.
    with memory.watch(tokens):
        gpu.peak = 10 * estimate
    assert len(logged) == 2


def test_a_peak_that_sampling_had_set_teaches_nothing(tiny: Path, gpu: Gpu) -> None:
    memory = memory_of(tiny, [])
    memory.prepare(600)
    gpu.peak = 10**12
    with memory.watch(1000):
        pass
    assert not memory.measured
    assert memory.cost is not None
    assert memory.cost.correction == 1.0


def test_needing_less_than_thought_leaves_a_working_plan_alone(tiny: Path, gpu: Gpu) -> None:
    gpu.free = int(2.5e9 / (1 - SPARE))
    memory = memory_of(tiny, logged := [])
    memory.prepare(600)
    before = (memory.micro_batch_tokens, memory.recomputed_layers)
    with memory.watch(memory.micro_batch_tokens):
        gpu.peak = 10**9
    assert (memory.micro_batch_tokens, memory.recomputed_layers) == before
    assert len(logged) == 1


def test_always_recomputing_is_obeyed_however_much_is_free(tiny: Path, gpu: Gpu) -> None:
    memory = memory_of(tiny, [], gradient_checkpointing=True)
    memory.prepare(600)
    assert memory.recomputed_layers == 3


def test_a_fixed_micro_batch_is_obeyed(tiny: Path, gpu: Gpu) -> None:
    gpu.free = int(3e9 / (1 - SPARE))
    memory = memory_of(tiny, [], micro_batch_tokens=8000)
    memory.prepare(600)
    assert memory.micro_batch_tokens == 8000
    assert memory.recomputed_layers > 0


def test_what_does_not_fit_at_all_is_explained_in_numbers(tiny: Path, gpu: Gpu) -> None:
    gpu.free = int(1e8 / (1 - SPARE))
    memory = memory_of(tiny, [])
    memory.prepare(600)
    text = memory.explain(600)
    assert "3 layers × 600 tokens × 4.0 KiB of layer inputs" in text
    assert "0.1 GiB are free" in text


def test_on_the_cpu_nothing_is_planned(tiny: Path) -> None:
    logged: list[str] = []
    memory = StepMemory(policy_for(config_for(tiny)), Memory(), logged.append)
    memory.prepare(100)
    with memory.watch(100):
        pass
    assert logged == []


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_recomputing_some_layers_runs_those_twice_and_changes_no_gradient(family: str, tmp_path: Path) -> None:
    config, datums = config_for(write_model(tmp_path / "model", family)), random_datums([(3, 9), (11, 2), (1, 17)])
    learner = learner_for(policy_for(config), config)
    learner._backward([datums])
    expected = gradients(learner.policy)
    calls = [0, 0, 0]
    for index, layer in enumerate(learner.layers):
        forward = layer.forward

        def counted(*args: Any, index: int = index, forward: Any = forward, **rest: Any) -> Any:
            calls[index] += 1
            return forward(*args, **rest)

        layer.forward = counted
    learner.memory.recomputed_layers = 2
    learner._backward([datums])
    assert calls == [2, 2, 1]
    for name, gradient in gradients(learner.policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_resume_with_other_free_memory_plans_the_same(tiny: Path, gpu: Gpu) -> None:
    gpu.free = 12 << 30
    before = memory_of(tiny, [])
    before.prepare(600)
    after = memory_of(tiny, [])
    after.load(before.state())
    gpu.free = 40 << 30
    for longest in (700, 4000, 9000):
        before.prepare(longest)
        after.prepare(longest)
        assert after.state() == before.state()
    fresh = memory_of(tiny, [])
    fresh.prepare(9000)
    assert fresh.state() != before.state()


def test_moments_that_the_optimizer_has_yet_to_allocate_are_not_free(tiny: Path, gpu: Gpu) -> None:
    memory = memory_of(tiny, [])
    memory.prepare(600, pending=7)
    assert memory.planned_room == memory.room() - 7


@dataclass
class Sampler:
    """Holds memory until it is asked for."""

    gpu: Gpu
    held: int
    asked: int = 0

    def release_memory(self) -> None:
        self.asked += 1
        self.gpu.free, self.held = self.gpu.free + self.held, 0


def test_where_memory_is_short_the_sampler_frees_its_cache_before_training(tiny: Path, gpu: Gpu) -> None:
    alone = memory_of(tiny, [])
    alone.prepare(600)
    gpu.free = 2 << 30
    sampler = Sampler(gpu, held=80 << 30)
    memory = memory_of(tiny, logged := [])
    memory.reclaim = sampler.release_memory
    memory.prepare(600)
    assert sampler.asked == 1
    assert (memory.micro_batch_tokens, memory.recomputed_layers) == (alone.micro_batch_tokens, 0)
    # The next batch is sampled, and takes the memory again; the plan stays.
    gpu.free, sampler.held = 2 << 30, 80 << 30
    memory.prepare(600)
    assert sampler.asked == 2
    assert len(logged) == 1


def test_where_there_is_room_the_sampler_keeps_its_cache(tiny: Path, gpu: Gpu) -> None:
    sampler = Sampler(gpu, held=20 << 30)
    memory = memory_of(tiny, [])
    memory.reclaim = sampler.release_memory
    for longest in (600, 600, 700):
        memory.prepare(longest)
    assert not sampler.asked


def test_the_margin_is_a_share_of_what_this_process_can_have(tiny: Path, gpu: Gpu) -> None:
    gpu.free = 10 << 30
    assert memory_of(tiny, []).room() == pytest.approx((1 - SPARE) * (10 << 30))
