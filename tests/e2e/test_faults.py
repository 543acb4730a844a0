"""Servers that answer well-formed nonsense: whatever they do, no wrong gradient is applied.

Something stands between the server and the run from the second step on. Either the run stops with the weights of the
first step, or the row is left out, or what was done is harmless: the run is then the one that nobody disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from inference_engine.loopback import Loopback
from safetensors.torch import load_file

from retrain.errors import RolloutError
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.tracking.console import health_lines
from retrain.types import Completion, Sampling

from .runs import rows, rows_without_times, train_quietly
from .test_servers import config_of
from .tiny import write_model, write_tokenizer

Choices = list[dict[str, Any]]
Alter = Callable[[dict[str, Any], Choices], Choices]

GROUP, PROMPTS, TOKENS = 8, 4, 24
SMALL = {
    "training__group_size": GROUP, "training__batch_size": PROMPTS, "training__max_tokens": TOKENS,
    "training__max_steps": 3, "training__save_every": 1, "training__keep": 9, "reward__custom_function": "score_length",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("served"), "qwen3"))


@pytest.fixture(params=[pytest.param("sampled", marks=pytest.mark.slow), "raw"])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Loopback]:
    with Loopback(model, meaning=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the run that nobody disturbs, for each mode of log-probs."""
    return _Calm(model, tmp_path_factory)


class _Calm(dict[str, Path]):
    """Run when it is first asked for."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self.model, self.folders = model, folders

    def __missing__(self, meaning: str) -> Path:
        with Loopback(self.model, meaning=meaning) as running:
            result, _ = train_quietly(config_of(running, self.folders.mktemp(meaning), **SMALL))
        self[meaning] = Path(result.log_dir)
        return self[meaning]


def weights(log_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(str(log_dir / "checkpoints" / f"step_{step:06d}" / "adapter" / "adapter_model.safetensors"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class FromSecondStep:
    """Alters the answers to every request for a group after those of the first step."""

    def __init__(self, alter: Alter) -> None:
        self.alter = alter
        self.seen = 0
        self.lock = threading.Lock()

    def __call__(self, body: dict[str, Any], choices: Choices) -> Choices:
        with self.lock:
            self.seen += body["n"] == GROUP
            if body["n"] != GROUP or self.seen <= PROMPTS:
                return choices
        return self.alter(body, choices)


def set_logprob(body: dict[str, Any], choices: Choices) -> Choices:
    choices[-1]["logprobs"]["token_logprobs"][3] -= 3.0
    return choices


def raise_logprob(body: dict[str, Any], choices: Choices) -> Choices:
    logprobs = choices[-1]["logprobs"]["token_logprobs"]
    logprobs[3] = logprobs[3] / 2
    return choices


def lift_logprob(body: dict[str, Any], choices: Choices) -> Choices:
    for choice in choices:
        choice["logprobs"]["token_logprobs"][3] += 5.0
    return choices


def set_id(body: dict[str, Any], choices: Choices) -> Choices:
    choices[-1]["token_ids"][3] = 3 + (choices[-1]["token_ids"][3] + 40) % 100
    return choices


def swap_contents(body: dict[str, Any], choices: Choices) -> Choices:
    """The ids of one choice with the log-probs of another."""
    first, last = choices[0], choices[-1]
    shared = min(len(first["token_ids"]), len(last["token_ids"]))
    logprobs = first["logprobs"]["token_logprobs"], last["logprobs"]["token_logprobs"]
    logprobs[0][:shared], logprobs[1][:shared] = logprobs[1][:shared], logprobs[0][:shared]
    return choices


def duplicate(body: dict[str, Any], choices: Choices) -> Choices:
    return [*choices[:-1], {**choices[0], "index": GROUP - 1}]


def drop(body: dict[str, Any], choices: Choices) -> Choices:
    return choices[:-1]


class SwapPrompts:
    """Gives every other request the answer of the one before it, and the other way round."""

    def __init__(self, with_ids: bool) -> None:
        self.with_ids = with_ids
        self.barrier = threading.Barrier(2)
        self.lock = threading.Lock()
        self.held: list[tuple[list[int], Choices]] = []

    def __call__(self, body: dict[str, Any], choices: Choices) -> Choices:
        with self.lock:
            self.held.append((body["prompt"], choices))
        try:
            self.barrier.wait(10)
        except threading.BrokenBarrierError:
            return choices
        with self.lock:
            other = next(one for prompt, one in reversed(self.held) if prompt != body["prompt"])
        return [{**c, "prompt_token_ids": c["prompt_token_ids"] if self.with_ids else None} for c in other]


def check_stopped(server: Loopback, calm: dict[str, Path], tmp_path: Path, expected: str) -> None:
    """The run ends before its second step, with the weights of the first."""
    config = config_of(server, tmp_path, **SMALL)
    with pytest.raises(RolloutError, match=expected):
        train_quietly(config)
    log_dir = Path(config.logging.log_dir)
    assert [row["step"] for row in rows(log_dir)] == [0]
    assert sorted(path.name for path in (log_dir / "checkpoints").iterdir())[-1] == "step_000001"
    assert same(weights(log_dir, 1), weights(calm[server.meaning], 1))


DISAGREES = (
    r"(?s)log-probs of \d+ of \d+ rows do not match the trainer's: group \d+, completion \d+ is off by .* at one token"
)

# The proof of the policy comes first; it may have looked at the row already.
ANY = f"{DISAGREES}|does not sample from the newest policy"


@pytest.mark.parametrize(
    ("alter", "expected"),
    slow(
        (raise_logprob, DISAGREES + ".*one log-prob"),
        (duplicate, "completion 7 of group .* repeats completion 0"),
        (SwapPrompts(with_ids=False), ANY),
        (set_logprob, DISAGREES + ".*one log-prob"),
        (lift_logprob, "it sent a log-prob of .*, above 0"),
        (set_id, ANY),
        (swap_contents, ANY),
        (drop, "it sent 7 of 8 completions"),
        (SwapPrompts(with_ids=True), "it sent the completion of another prompt"),
    ),
)
def test_what_is_altered_on_the_way_stops_the_run_before_anything_is_trained_on_it(
    server: Loopback,
    calm: dict[str, Path],
    tmp_path: Path,
    alter: Alter,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    server.alter = FromSecondStep(alter)
    check_stopped(server, calm, tmp_path, expected)


class Sharper:
    """Lets the server sample otherwise than it was asked to, from the second step on."""

    def __init__(self, **changes: Any) -> None:
        self.changes, self.seen = changes, 0

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.seen += body["n"] == GROUP
        return body | self.changes if body["n"] == GROUP and self.seen > PROMPTS else body


@pytest.mark.parametrize("changes", slow({"temperature": 3.0}, {"temperature": 0.3}, {"top_k": 4}))
def test_sampling_that_nobody_asked_for_stops_the_run(
    server: Loopback, calm: dict[str, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    server.change = Sharper(**changes)
    check_stopped(server, calm, tmp_path, f"{ANY}|does not sample as requested")


@pytest.mark.slow
@pytest.mark.parametrize("held", ["the first adapter", *slow("another model")])
def test_other_weights_stop_the_run(server: Loopback, calm: dict[str, Path], tmp_path: Path, held: str) -> None:
    choices, first = server.choices, dict[str, torch.Tensor]()

    def stale(body: dict[str, Any], adapter: dict[str, torch.Tensor] | None) -> Choices:
        if adapter is not None and body["n"] == GROUP:
            noise = 0.0 if held == "the first adapter" else 0.3
            if not first:
                first.update({name: tensor.clone() for name, tensor in adapter.items()})
            elif any(not torch.equal(tensor, first[name]) for name, tensor in adapter.items()):
                adapter = {name: tensor + noise * torch.randn_like(tensor) for name, tensor in first.items()}
        return choices(body, adapter)

    server.choices = stale  # type: ignore[method-assign]
    check_stopped(server, calm, tmp_path, ANY)


def shuffle(body: dict[str, Any], choices: Choices) -> Choices:
    order = np.random.default_rng(0).permutation(len(choices))
    return [choices[at] for at in order]


def set_text(body: dict[str, Any], choices: Choices) -> Choices:
    return [{**choice, "text": "something else"} for choice in choices]


def round_logprobs(body: dict[str, Any], choices: Choices) -> Choices:
    for choice in choices:
        choice["logprobs"]["token_logprobs"] = [round(v, 4) for v in choice["logprobs"]["token_logprobs"]]
    return choices


@pytest.mark.parametrize("alter", [shuffle, *slow(set_text)])
@pytest.mark.slow
def test_reordered_choices_and_altered_texts_change_nothing(
    server: Loopback, calm: dict[str, Path], tmp_path: Path, alter: Alter
) -> None:
    server.alter = FromSecondStep(alter)
    result, _ = train_quietly(config_of(server, tmp_path, **SMALL))
    assert rows_without_times(result.log_dir) == rows_without_times(calm[server.meaning])
    assert same(weights(Path(result.log_dir), 3), weights(calm[server.meaning], 3))


@pytest.mark.slow
def test_log_probs_rounded_to_four_digits_are_within_the_tolerance(server: Loopback, tmp_path: Path) -> None:
    server.alter = FromSecondStep(round_logprobs)
    result, _ = train_quietly(config_of(server, tmp_path, **SMALL))
    metrics = rows(result.log_dir)
    assert [row["rows_excluded"] for row in metrics] == [0, 0, 0]
    assert all(row["ratio_max"] < 1.001 for row in metrics)


@pytest.mark.parametrize("altered", [set_id, *slow(set_logprob)])
@pytest.mark.slow
def test_one_row_that_disagrees_is_left_out_counted_and_shown(
    server: Loopback, calm: dict[str, Path], tmp_path: Path, altered: Alter
) -> None:
    once = threading.Lock()

    def alter(body: dict[str, Any], choices: Choices) -> Choices:
        return altered(body, choices) if once.acquire(blocking=False) else choices

    server.alter = FromSecondStep(alter)
    result, printed = train_quietly(config_of(server, tmp_path, **SMALL))
    metrics = rows(result.log_dir)
    assert [row["rows_excluded"] for row in metrics] == [0, GROUP, 0], "with the group whose advantages it would set"
    assert metrics[1]["rows_mismatch_max"] > 0.02
    assert metrics[1]["ratio_max"] < 1.02, "what is left agrees"
    assert "completion 7 is" in printed
    assert "excluded from the loss" in printed


@pytest.mark.parametrize("every", [False, *slow(True)])
@pytest.mark.slow
def test_a_step_ahead_rows_that_stand_out_from_the_drift_are_found(
    server: Loopback, tmp_path: Path, every: bool
) -> None:
    once = threading.Lock()

    def alter(body: dict[str, Any], choices: Choices) -> Choices:
        return set_logprob(body, choices) if every or once.acquire(blocking=False) else choices

    server.alter = FromSecondStep(alter)
    config = config_of(server, tmp_path, training__async_steps=1, training__lr=1e-4, **SMALL)
    if every:
        with pytest.raises(RolloutError, match=DISAGREES):
            train_quietly(config)
        assert len(rows(config.logging.log_dir)) <= 2
    else:
        result, _ = train_quietly(config)
        assert [row["rows_excluded"] for row in rows(result.log_dir)] == [0, GROUP, 0]


def test_the_engine_in_this_process_is_compared_like_any_other(model: Path, tmp_path: Path) -> None:
    with Loopback(model) as unused:
        config = config_of(unused, tmp_path, inference__engine="pytorch", inference__url="", **SMALL)
    generate = PyTorchEngine.generate

    def altered(engine: PyTorchEngine, prompts: Any, sampling: Sampling) -> list[list[Completion]]:
        groups = generate(engine, prompts, sampling)
        for group in groups:
            group[-1].logprobs_T[3] -= 3.0
        return groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PyTorchEngine, "generate", altered)
        with pytest.raises(RolloutError, match=DISAGREES + ".*one log-prob"):
            train_quietly(config)
    assert rows(config.logging.log_dir) == []


def test_a_ratio_far_from_one_is_a_warning_on_the_console() -> None:
    assert health_lines({"ratio_max": 1.4, "staleness": 0, "rows_excluded": 0}) == []
    assert "ratio_max=20.0 is far from 1, though" in health_lines({"ratio_max": 20.0, "staleness": 0})[0]
    assert health_lines({"ratio_max": 5.0, "staleness": 1}) == []
    assert "more than one update" in health_lines({"ratio_max": 20.0, "staleness": 1})[0]
    metrics = {"ratio_max": 1.0, "rows_excluded": 2, "rows_checked": 64, "rows_mismatch_max": 3.21}
    assert "2 of 64 rows excluded" in health_lines(metrics)[0]
