"""Steps that repeat to the bit with several threads, and sizes that survive in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from e2e.tiny import config_for, learner_for, policy_for, random_prompts

from retrain.backends.local.loss import summed_loss
from retrain.backends.local.sizes import SIZES_FILE, load_sizes, save_sizes
from retrain.config import load_config
from retrain.config.schema import Loss
from retrain.errors import BackendError, ConfigError
from retrain.losses import build_loss
from retrain.losses.batch import TokenBatch
from retrain.modeling.determinism import Determinism, flash_backward_slowdown, gather_rows, sum_by_row
from retrain.modeling.torch_internals import any_order
from retrain.types import Datum, Sampling

pytestmark = pytest.mark.threads
REPEATS = 30


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_gradients_of_rows_gathered_many_times_repeat_to_the_bit(four_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 64, generator=generator)
    index = torch.cat([torch.randint(0, 8, (3000,), generator=generator), torch.arange(4000)])
    weight = torch.randn(len(index), 64, generator=generator)

    def gradient() -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        (gather_rows(leaf, index) * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    first = gradient()
    torch.testing.assert_close(first, torch.zeros_like(rows).index_add_(0, index, weight))
    assert all(torch.equal(first, gradient()) for _ in range(REPEATS))


def test_sums_by_row_are_sums_and_can_be_differentiated() -> None:
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], requires_grad=True)
    sums = sum_by_row(values, torch.tensor([2, 0, 2]), 3)
    assert sums.tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]
    (sums * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[3.0, 3.0], [1.0, 1.0], [3.0, 3.0]]


@pytest.mark.parametrize("kind", ["gspo", "grpo", "importance_sampling"])
def test_the_gradient_of_a_loss_repeats_to_the_bit(four_threads: None, kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sampled = -torch.rand(40_000, generator=generator)
    shift = 0.01 * torch.randn(40_000, generator=generator)

    def gradient() -> torch.Tensor:
        logprobs = (sampled + shift).requires_grad_()
        batch = TokenBatch(logprobs, sampled, shift * 100, torch.ones(40_000), torch.arange(40_000) // 5000, 8)
        summed_loss(batch, build_loss(Loss(type=kind))).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(REPEATS))


def grouped_datums() -> list[Datum]:
    """Groups of many short completions, so that one hidden state predicts the first token of each of them."""
    rng = np.random.default_rng(0)
    datums = []
    for prompt in random_prompts((40, 60)):
        for length in rng.integers(2, 8, size=64):
            advantages, logprobs = rng.normal(size=length), -rng.random(length).astype(np.float32)
            datums.append(Datum(prompt, rng.integers(3, 128, size=length), logprobs, advantages, np.ones(length, bool)))
    return datums


@pytest.mark.parametrize("deterministic", ["auto", *slow(False)])
def test_a_training_step_repeats_to_the_bit_with_four_threads(
    four_threads: None, tiny: Path, deterministic: Any
) -> None:
    config = config_for(tiny, training__deterministic=deterministic)
    datums = grouped_datums()

    def step() -> list[Any]:
        learner = learner_for(policy_for(config), config)
        metrics = learner.step(datums)
        return [metrics["loss"], metrics["grad_norm"], *(t.tolist() for t in learner.policy.adapter_state().values())]

    first = step()
    assert all(step() == first for _ in range(8))


def test_deterministic_kernels_are_on_inside_and_as_before_outside(tiny: Path) -> None:
    determinism = Determinism("auto", policy_for(config_for(tiny)), print)
    assert not torch.are_deterministic_algorithms_enabled()
    with determinism.kernels():
        assert torch.are_deterministic_algorithms_enabled()
        with any_order():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    with determinism.kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


# In tokens, and how much longer the deterministic backward pass took than the other on an H200 (2026-11-16).
UNEVEN = [4000, 2500, 1500, 800, 400]
MEASURED = [
    (UNEVEN, 2.19),
    ([1900] * 5, 1.49),
    ([3000, 2800, 1800, 900, 400, 200, 100], 1.58),
    ([579] * 16, 0.99),
    ([9200], 1.62),
]


@pytest.mark.parametrize(("lengths", "measured"), MEASURED)
def test_the_price_of_deterministic_attention_is_estimated_as_it_was_measured(
    lengths: list[int], measured: float
) -> None:
    assert flash_backward_slowdown(lengths, 32, 132) == pytest.approx(measured, rel=0.2)


def test_a_few_long_sequences_on_a_gpu_are_left_to_faster_kernels_unless_configured_otherwise(tiny: Path) -> None:
    for wanted, expected in (("auto", False), (True, True)):
        logged: list[str] = []
        determinism = Determinism(wanted, policy_for(config_for(tiny)), logged.append)  # type: ignore[arg-type]
        # A Qwen3-4B on an H200.
        determinism.heads, determinism.width, determinism.layer_size, determinism.processors = 32, 4096, 101e6, 132
        for lengths, always in (
            ([500], True),
            ([579] * 16, True),
            ([4096] * 4, True),
            (UNEVEN, False),
            ([9000], False),
        ):
            assert determinism.includes_attention(lengths) == (always or expected)
        assert len(logged) == (0 if expected else 1)


def test_an_operation_without_a_deterministic_kernel_is_reported_once_and_the_run_continues(
    tiny: Path,
) -> None:
    logged: list[str] = []
    determinism = Determinism("auto", policy_for(config_for(tiny)), logged.append)
    determinism.disable_after(RuntimeError("odd_cuda does not have a deterministic implementation. You can ..."))
    assert not determinism.is_on
    assert logged == [
        "Warning: this run is not bitwise reproducible: odd_cuda does not have a deterministic implementation."
    ]
    # Someone else has set it: trying again would never end.
    with pytest.raises(RuntimeError, match="odd_cuda"):
        determinism.disable_after(RuntimeError("odd_cuda does not have a deterministic implementation. You can ..."))
    assert len(logged) == 1


def test_an_operation_without_a_deterministic_kernel_ends_a_run_that_must_repeat(tiny: Path) -> None:
    determinism = Determinism(True, policy_for(config_for(tiny)), print)
    with pytest.raises(BackendError, match="deterministic = true is not possible: odd_cuda does not have"):
        determinism.disable_after(RuntimeError("odd_cuda does not have a deterministic implementation"))
    with pytest.raises(RuntimeError, match="something else"):
        determinism.disable_after(RuntimeError("something else"))


@pytest.mark.parametrize("value", ["auto", True, False])
def test_deterministic_takes_auto_true_and_false(value: Any) -> None:
    assert load_config(None, {"training.deterministic": value}).training.deterministic is value


@pytest.mark.parametrize("value", ["yes", 2, "true"])
def test_deterministic_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[training\] deterministic"):
        load_config(None, {"training.deterministic": value})


class SizedEngine:
    """An engine whose batches follow free memory."""

    def __init__(self, rows: int, fits: bool = True) -> None:
        self.rows, self.fits = rows, fits

    def generate(self, prompts: Any, sampling: Sampling) -> Any:
        raise NotImplementedError

    def sync(self, weights: object) -> None: ...

    def shutdown(self) -> None: ...

    def sizes(self) -> dict[str, int]:
        return {"rows": self.rows}

    def restore_sizes(self, sizes: dict[str, int]) -> bool:
        self.rows = sizes["rows"] if self.fits else self.rows
        return self.fits


def test_a_checkpoint_keeps_the_sizes_of_training_and_sampling(tiny: Path, tmp_path: Path) -> None:
    config = config_for(tiny)
    before, after = (learner_for(policy_for(config), config) for _ in range(2))
    before.memory.micro_batch_tokens, before.memory.recomputed_layers = 777, 2
    before.memory.planned_for, before.memory.planned_room = 300, 5e9
    save_sizes(tmp_path, before, SizedEngine(11))
    engine = SizedEngine(64)
    load_sizes(tmp_path, after, engine)
    assert engine.rows == 11
    assert after.memory.state() == before.memory.state()


def test_micro_batches_that_the_user_asks_for_win_over_recorded_ones(tiny: Path, tmp_path: Path) -> None:
    before = learner_for(policy_for(config_for(tiny)), config_for(tiny))
    save_sizes(tmp_path, before, SizedEngine(1))
    config = config_for(tiny, memory__micro_batch_tokens=512)
    after = learner_for(policy_for(config), config)
    load_sizes(tmp_path, after, SizedEngine(1))
    assert after.memory.micro_batch_tokens == 512


def test_what_cannot_be_taken_over_is_reported(tiny: Path, tmp_path: Path, four_threads: None) -> None:
    logged: list[str] = []
    config = config_for(tiny)
    learner = learner_for(policy_for(config), config)
    learner.log = logged.append
    save_sizes(tmp_path, learner, SizedEngine(1))
    torch.set_num_threads(2)
    load_sizes(tmp_path, learner, SizedEngine(1, fits=False))
    assert logged[0].startswith("Warning: this run used 4 threads and now has 2;")
    assert logged[1].startswith("Warning: the free memory has changed")
    torch.set_num_threads(1)
    save_sizes(tmp_path, learner, SizedEngine(1))
    torch.set_num_threads(2)
    load_sizes(tmp_path, learner, SizedEngine(1))
    assert logged[2].startswith("Warning: this run used 1 thread and now has 2;")


def test_a_checkpoint_without_sizes_still_loads(tiny: Path, tmp_path: Path) -> None:
    config = config_for(tiny)
    load_sizes(tmp_path, learner_for(policy_for(config), config), SizedEngine(1))
    assert not (tmp_path / SIZES_FILE).exists()
