"""Gradients of parts of a step, computed while the rest of it is still being sampled."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.sharing import take_steps
from e2e.tiny import config_for, learner_for, policy_for, random_datums
from inference_engine import plain_kernels
from torch import Tensor

from retrain.backends.local import early
from retrain.backends.local.early import EarlyGradients
from retrain.backends.local.learner import Learner, Part
from retrain.checks.agreement import FLOAT32, Agreement
from retrain.errors import BackendError
from retrain.inference_engine.pytorch import choice, graphs
from retrain.types import Datum, Sampling
from tests.cases import slow

SIZES = ((3, 9), (11, 2), (1, 17), (6, 6), (3, 1), (8, 13), (4, 4), (9, 5))


def learner(model: Path, **overrides: Any) -> Learner:
    config = config_for(model, **overrides)
    return learner_for(policy_for(config), config)


@contextmanager
def gradients_of(made: Learner) -> Iterator[EarlyGradients]:
    own = EarlyGradients(made)
    yield own
    own.close()


def in_parts(datums: Sequence[Datum], size: int = 2) -> list[Sequence[Datum]]:
    return [datums[at : at + size] for at in range(0, len(datums), size)]


def renumbered(datums: Sequence[Datum]) -> list[Datum]:
    """The same rows as a complete step has them, whose groups have other numbers."""
    return [replace(datum, group=at + 5) for at, datum in enumerate(datums)]


def state_after(made: Learner, datums: Sequence[Datum], part: Part | None = None) -> tuple[Any, dict[str, Tensor]]:
    metrics = made.step(datums, part=part)
    return metrics, {name: tensor.clone() for name, tensor in made.policy.adapter_state().items()}


def gradients_before_update(
    made: Learner, datums: Sequence[Datum], part: Part | None = None
) -> tuple[Any, list[Tensor]]:
    """The metrics of a step, and the gradients that the optimizer gets; Adam's first step only keeps their signs."""
    found: list[Tensor] = []
    update = made.optimizer.step

    def watch(lr: float) -> float | None:
        found.extend(master.grad.clone() for master in made.optimizer.masters if master.grad is not None)
        return update(lr)

    made.optimizer.step = watch  # type: ignore[method-assign]
    return made.step(datums, part=part), found


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"loss__type": "grpo"},
        {"loss__type": "dr_grpo"},
        {"loss__type": "gspo"},
        {"kl__beta": 0.1},
        {"model__dtype": "bf16"},
        {"memory__micro_batch_tokens": 16},
    ],
)
@pytest.mark.parametrize("known", [6, *slow(8, 4)])
def test_a_step_in_parts_is_the_same_step(tiny: Path, overrides: dict[str, Any], known: int) -> None:
    datums = random_datums(SIZES)
    whole, expected = gradients_before_update(learner(tiny, **overrides), datums)
    made = learner(tiny, **overrides)
    with gradients_of(made) as own:
        for number, part in enumerate(in_parts(datums[:known])):
            own.add(number, part)
        ours, found = gradients_before_update(made, renumbered(datums), own.collect())
    rel = 6e-2 if overrides.get("model__dtype") == "bf16" else 3e-5
    assert ours == pytest.approx(whole, rel=rel, abs=rel / 10)
    assert len(found) == len(expected) > 0
    for ours_one, theirs in zip(found, expected, strict=True):
        assert float((ours_one - theirs).norm()) <= rel * float(theirs.norm())


@pytest.mark.parametrize("held", [1, *slow(0, 100)])
def test_the_order_in_which_parts_come_changes_no_bit(tiny: Path, held: int) -> None:
    datums = random_datums(SIZES)
    parts = list(enumerate(in_parts(datums, 1)))
    states = []
    for seed in range(3):
        made = learner(tiny)
        with gradients_of(made) as own:
            own.most_held = held
            for number, part in random.Random(seed).sample(parts, len(parts)):
                own.add(number, part)
            states.append(state_after(made, datums, own.collect()))
    for metrics, state in states[1:]:
        assert metrics == states[0][0]
        assert all(torch.equal(tensor, states[0][1][name]) for name, tensor in state.items())


def test_parts_beyond_the_memory_for_them_wait_for_their_turn(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "HELD_BYTES", 0)
    made, datums = learner(tiny), random_datums(SIZES)
    computed: list[int] = []
    compute = made.compute_part
    monkeypatch.setattr(made, "compute_part", lambda rows: computed.append(len(rows)) or compute(rows))
    with gradients_of(made) as own:
        own.add(1, datums[3:])
        own.jobs[0].result()
        assert computed == []
        own.add(0, datums[:3])
        part = own.collect()
    assert computed == [3, 5]
    assert part is not None and len(part.totals.datums) == 8


def test_a_part_without_rows_holds_up_nothing(tiny: Path) -> None:
    made, datums = learner(tiny), random_datums(SIZES)
    nothing = replace(datums[0], mask_T=np.zeros_like(datums[0].mask_T))
    with gradients_of(made) as own:
        own.most_held = 0
        for number, part in enumerate(([], datums[:4], [nothing], datums[4:])):
            own.add(number, part)
        part = own.collect()
        assert part is not None and len(part.totals.datums) == 8
        own.add(0, [])
        assert own.collect() is None


def test_discarded_parts_leave_nothing_behind(tiny: Path) -> None:
    datums = random_datums(SIZES)
    _, expected = state_after(learner(tiny), datums[2:])
    made = learner(tiny)
    with gradients_of(made) as own:
        own.add(0, datums[:2])
        own.discard()
        assert all(parameter.grad is None for parameter in made.policy.adapted.parameters())
        _, found = state_after(made, datums[2:], own.collect())
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_rows_that_are_not_part_of_the_step_after_all_are_not_trained_on(tiny: Path) -> None:
    datums = random_datums(SIZES)
    _, expected = state_after(learner(tiny), datums[2:])
    made = learner(tiny)
    with gradients_of(made) as own:
        own.add(0, datums[:4])
        _, found = state_after(made, datums[2:], own.collect())
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_an_error_on_the_thread_is_raised_when_the_step_is_taken(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, datums = learner(tiny), random_datums(SIZES)

    def fail(rows: Sequence[Datum]) -> Part:
        raise BackendError("out of memory")

    with gradients_of(made) as own:
        monkeypatch.setattr(made, "compute_part", fail)
        own.add(0, datums)
        with pytest.raises(BackendError, match="out of memory"):
            own.collect()
        monkeypatch.undo()
        own.add(0, datums)
        assert own.collect() is not None


@pytest.mark.slow
def test_a_group_that_disagrees_is_excluded_from_parts_too(tiny: Path) -> None:
    outcomes = []
    for is_early in (False, True):
        made = learner(tiny)
        datums = [replace(datum, group=at // 2, index=at % 2) for at, datum in enumerate(sampled(made, SIZES * 4))]
        datums[9] = replace(datums[9], logprobs_T=datums[9].logprobs_T - 3)
        made.agreement = Agreement(FLOAT32, lambda line: None)
        with gradients_of(made) as own:
            if is_early:
                for number, part in enumerate(in_parts(datums)):
                    own.add(number, [replace(datum, group=0) for datum in part])
            outcomes.append(state_after(made, datums, own.collect()))
    assert outcomes[0][0]["rows_excluded"] == 2
    assert outcomes[1][0] == pytest.approx(outcomes[0][0], rel=1e-5)
    assert all(torch.equal(tensor, outcomes[1][1][name]) for name, tensor in outcomes[0][1].items())


def sampled(made: Learner, sizes: Sequence[tuple[int, int]]) -> list[Datum]:
    """Rows with the log-probs that the policy has."""
    datums = random_datums(sizes)
    with torch.no_grad():
        return [replace(datum, logprobs_T=made.logprobs(made.pack([datum])).numpy()) for datum in datums]


def test_a_sampler_gets_its_turn_between_two_micro_batches(tiny: Path) -> None:
    made, datums = learner(tiny, memory__micro_batch_tokens=8), random_datums(SIZES)
    turns: list[str] = []
    backward = made._backward_one
    made._backward_one = lambda *given: turns.append("train") or backward(*given)  # type: ignore[method-assign]
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            with made.policy.turns:
                turns.append("sample")

    thread = threading.Thread(target=sample)
    with gradients_of(made) as own:
        thread.start()
        own.add(0, datums)
        own.collect()
        done.set()
        thread.join()
    trained = [at for at, turn in enumerate(turns) if turn == "train"]
    assert len(trained) > 3
    assert all("sample" in turns[a:b] for a, b in pairwise(trained))


@pytest.fixture
def _running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine samples as on a GPU, with plain loops in place of kernels."""
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    monkeypatch.setattr(choice, "load_kernels", lambda: plain_kernels)
    monkeypatch.setattr(graphs, "SMALLEST", 2)
    monkeypatch.setattr(graphs, "POLL_EVERY", 2)


@pytest.mark.usefixtures("_running_batch")
@pytest.mark.slow
def test_sampling_and_training_may_share_a_device(tiny: Path) -> None:
    sampling = Sampling(max_tokens=40, n=2, temperature=1.5)
    options = {"stop_every": 8, "training__temperature": 1.5, "training__max_tokens": 40, "training__lr": 1e-4}
    sequential, overlapped, again = (take_steps(tiny, on, sampling, **options) for on in (False, True, True))
    assert overlapped.early > 0
    assert overlapped.tokens == sequential.tokens
    for ours, theirs in zip(overlapped.gradients, sequential.gradients, strict=True):
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
    assert again.metrics == overlapped.metrics
    assert all(torch.equal(tensor, again.adapter[name]) for name, tensor in overlapped.adapter.items())
