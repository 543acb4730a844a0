"""The Tinker backend with the real SDK, against a service on the loopback that computes real gradients."""

from __future__ import annotations

import gc
import json
import os
import queue
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker")

import torch
from cases import slow
from e2e.runs import rows, rows_without_times, train_quietly
from e2e.tiny import datums_of, learner_for, policy_for, random_prompts
from waiting import wait_for

from retrain.backends.local.learner import Learner
from retrain.backends.tinker import build
from retrain.backends.tinker.backend import IMPORTANCE_SAMPLING, TinkerBackend
from retrain.backends.tinker.losses import cancel
from retrain.cli import run, trial
from retrain.config import TrainConfig, load_config
from retrain.config.load import dump_config
from retrain.config.schema import Loss
from retrain.errors import BackendError, CheckpointError, ConfigError, MissingExtraError, RetrainError, RolloutError
from retrain.inference_engine import StreamingEngine, Turn
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.losses import build_loss
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Completion, Datum, Sampling

from .tinker_server import KEY, LOSSES, Refused, Sampler, TinkerServer

# The SDK leaves the connection open that it asks for its own settings with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def leaks_show_here() -> Iterator[None]:
    """The SDK leaves connections open; they are to be found now, so that no other file's tests are blamed for them."""
    yield
    gc.collect()


BACKENDS: list[TinkerBackend] = []


@pytest.fixture
def server(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerServer]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TinkerServer(tmp_path / "exports", str(tiny)) as made:
        yield made
        while BACKENDS:
            BACKENDS.pop().service.close("success")


def config_for(server: TinkerServer, folder: Path, **overrides: Any) -> TrainConfig:
    """Four short steps; overrides are `section__key`."""
    small: dict[str, Any] = {
        "backend.backend": "tinker",
        "model.model": server.base_model,
        "model.base_url": server.url,
        "model.lora_rank": 4,
        "data.source": "arithmetic",
        "training.seed": 3,
        "training.max_steps": 4,
        "training.batch_size": 2,
        "training.group_size": 4,
        "training.max_tokens": 8,
        "training.temperature": 0.9,
        "training.lr": 1e-2,
        "training.save_every": 2,
        "reward.type": "custom",
        "reward.custom_module": "e2e.scores",
        "reward.custom_function": "score_length",
        "reward.workers": 1,
        "logging.log_dir": str(folder / "logs"),
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})


def backend_for(config: TrainConfig, logged: list[str] | None = None) -> TinkerBackend:
    log = logged.append if logged is not None else lambda line: None
    backend = build(config, load_tokenizer(config.model.model), log, lambda phase, done, total: None)
    assert isinstance(backend, TinkerBackend)
    BACKENDS.append(backend)
    return backend


def run_file(config: TrainConfig, folder: Path, *flags: str) -> int:
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    return run([str(path), *flags])


def off_policy_datums(config: TrainConfig, constant: bool = False) -> list[Datum]:
    """Rows whose ratios lie well below and above 1 and far from every clip bound, one of them with masked tokens."""
    policy = policy_for(config, trained=False)
    engine = PyTorchEngine(policy, config.inference, load_tokenizer(config.model.model), lambda *values: None)
    prompts = random_prompts([5, 9, 3])
    completions = engine.generate(prompts, Sampling(max_tokens=8, n=3, seed=5))
    rng = np.random.default_rng(0)
    datums = []
    for number, datum in enumerate(datums_of(prompts, completions)):
        length = len(datum.completion_ids_T)
        ratios = rng.choice([0.45, 0.65, 1.05, 1.6, 2.6], size=length)
        noise = -np.log(ratios).astype(np.float32)
        mask = np.ones(length, bool)
        if number == 1:
            mask[: length // 2] = False
        advantages = np.full(length, rng.normal()) if constant else datum.advantages_T
        datums.append(Datum(datum.prompt_ids, datum.completion_ids_T, datum.logprobs_T + noise, advantages, mask))
    return datums


def distance_to_a_bound(learner: Learner, datums: list[Datum]) -> float:
    """How far the nearest ratio is from where the gradient jumps, as a log-ratio."""
    packed, loss = learner.pack(datums), learner.config.loss
    with torch.no_grad():
        differences = (learner.logprobs(packed) - packed.sampled_logprobs) * packed.mask
    if loss.type == "gspo":
        rows = [differences[packed.row == row] for row in range(packed.rows)]
        masks = [packed.mask[packed.row == row] for row in range(packed.rows)]
        differences = torch.stack([row.sum() / mask.sum() for row, mask in zip(rows, masks, strict=True)])
    else:
        differences = differences[packed.mask > 0]
    bounds = torch.tensor([1 - loss.clip_low, 1 + loss.clip_high, *([loss.ratio_cap] if loss.ratio_cap else [])])
    return float((differences[:, None] - bounds.log()).abs().min())


@pytest.mark.parametrize(
    "loss",
    [
        {"loss__type": "importance_sampling", "loss__ratio_cap": 1.2},
        {"loss__type": "cispo", "loss__ratio_cap": 0.0},
        {"loss__type": "gspo", "loss__ratio_cap": 0.0, "loss__clip_low": 0.06, "loss__clip_high": 0.4},
        *slow(
            {"loss__type": "importance_sampling", "loss__ratio_cap": 0.0},
            {"loss__type": "ppo", "loss__ratio_cap": 0.0, "loss__clip_low": 0.1, "loss__clip_high": 0.3},
            {"loss__type": "dr_grpo", "loss__ratio_cap": 0.0, "training__weight_decay": 0.1},
            {"loss__type": "importance_sampling", "loss__grad_clip": 0.01},
        ),
    ],
    ids=lambda values: "-".join(str(value) for value in values.values()),
)
def test_two_steps_on_the_service_are_two_local_steps(
    server: TinkerServer, tmp_path: Path, loss: dict[str, Any]
) -> None:
    # Raw log-probs are those of temperature 1. A large eps and a small step keep rounding errors as small as they are.
    small = {"training__temperature": 1.0, "training__lr": 2e-4, "optimizer__eps": 1e-2}
    config = config_for(server, tmp_path, **small, **loss)
    datums = off_policy_datums(config, constant=config.loss.type == "gspo")
    local_policy = policy_for(config, trained=False)
    learner = learner_for(local_policy, config)
    start = {name: tensor.clone() for name, tensor in local_policy.adapter_state().items()}
    backend = backend_for(config)
    for step in range(2):
        assert distance_to_a_bound(learner, datums) > 0.01
        ours, theirs = learner.step(datums), backend.train_step(datums, step)
        for key in ("loss", "ratio_mean", "ratio_max", "kl_sample_train"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
        # One unit in the last place of the weights moves it by up to 1.5e-4: the attention of the tiny model is sharp.
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    remote = server.trainees["run-1"].policy.adapter_state()
    moved_here = torch.cat([(local_policy.adapter_state()[name] - start[name]).flatten() for name in start])
    moved_there = torch.cat([(remote[name] - start[name]).flatten() for name in start])
    assert moved_here.norm() > 1e-4
    assert torch.nn.functional.cosine_similarity(moved_here, moved_there, dim=0) > 0.99999
    torch.testing.assert_close(moved_there, moved_here, rtol=1e-3, atol=1e-5)


def test_a_run_prints_records_and_keeps_what_it_should(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_file(config_for(server, tmp_path), tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    start = printed.index("Connecting to Tinker...")
    assert printed[start + 1] == f"Creating LoRA training client (model={server.base_model}, rank=4)..."
    assert printed[start + 2] == "Training client ready."
    assert sum(line.startswith("Step ") for line in printed) == 4
    assert not any("placeholder" in line for line in printed)
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert state["adapter"] in server.states and state["adapter"].startswith("tinker://run-1/weights/step_000004-")
    (done,) = [line for line in printed if line.startswith("Done: ")]
    assert f"weights in {state['adapter']}" in done
    for row in rows(tmp_path / "logs"):
        # The same weights sampled and trained, both with raw log-probs: temperature 0.9 must not show.
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["loss_is_placeholder"] is False
        assert row["grad_norm"] > 0
    written = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_update_and_sampler_are_submitted_together_once_the_gradient_is_known(
    server: TinkerServer, tmp_path: Path
) -> None:
    config = config_for(server, tmp_path)
    backend = backend_for(config)
    release = threading.Event()
    server.worker.submit(release.wait, 20)
    step = threading.Thread(target=backend.train_step, args=(off_policy_datums(config), 0))
    step.start()
    wait_for(lambda: server.paths()[-1] == "forward_backward")
    again = threading.Event()
    # The gradient is done, and nothing after it until this is.
    server.worker.submit(again.wait, 20)
    release.set()
    wait_for(lambda: server.paths()[-3:] == ["forward_backward", "optim_step", "save_weights_for_sampler"])
    again.set()
    step.join(20)


class Tampering:
    """Alters one log-prob of the last completion of some groups, counted from one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: range) -> None:
        self.groups, self.seen, respond = groups, 0, Sampler.response

        def response(sampler: Sampler, prompt: Any, drawn: Any) -> Any:
            sent = respond(sampler, prompt, drawn)
            self.seen += 1
            if self.seen in self.groups:
                values = np.frombuffer(sent.sequences[-1].logprobs, np.float32).copy()
                values[0] -= 3.0
                sent.sequences[-1].logprobs = values.tobytes()
            return sent

        monkeypatch.setattr(Sampler, "response", response)


@pytest.mark.slow
def test_altered_log_probs_stop_the_run_before_the_service_takes_the_step(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tampering(monkeypatch, range(9, 1000))
    config = config_for(server, tmp_path, training__batch_size=8, training__group_size=8)
    with pytest.raises(
        RolloutError, match=r"rows do not match the trainer's: group \d, completion 7 is .*one log-prob"
    ):
        train_quietly(config)
    assert server.paths().count("optim_step") == 1
    assert [row["step"] for row in rows(tmp_path / "logs")] == [0]


@pytest.mark.slow
def test_one_altered_row_is_taken_back_from_the_service(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tampering(monkeypatch, range(10, 11))
    config = config_for(server, tmp_path, training__batch_size=8, training__group_size=8)
    result, printed = train_quietly(config)
    metrics = rows(result.log_dir)
    assert sum(row["rows_checked"] for row in metrics) > 0
    assert sum(row["rows_excluded"] for row in metrics) in (0, 8), "the row with its group"
    assert "do not match the trainer's" in printed or metrics[1]["rows_mismatch_max"] < 0.1, (
        "unless nobody looked at it"
    )


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo", "gspo", "dr_grpo"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_a_row_that_is_taken_back_leaves_no_gradient(kind: Any, cap: float) -> None:
    rng = np.random.default_rng(0)
    own_T = rng.normal(size=12).astype(np.float32) - 2
    mask_T = np.arange(12) > 2
    told_T = (own_T - rng.normal(size=12)).astype(np.float32)
    datum = Datum(np.arange(3), np.arange(12), told_T, rng.normal(size=12), mask_T)
    loss = build_loss(Loss(type=kind, ratio_cap=cap)).on_tinker()
    assert loss is not None
    logprobs = torch.tensor(own_T, requires_grad=True)
    total = torch.zeros(())
    for row, wanted in ((datum, loss), (cancel(loss, datum, own_T), IMPORTANCE_SAMPLING)):
        inputs = {
            "logprobs": torch.tensor(np.where(mask_T, row.logprobs_T, 0.0)),
            "advantages": torch.tensor(np.where(mask_T, row.advantages_T, 0.0)),
            "sequence_ratio_mask": torch.tensor(mask_T.astype(np.float32)),
        }
        total = total + LOSSES[wanted.name](logprobs, inputs, dict(wanted.settings or {}))
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.abs().max() < 1e-5


def test_all_prompts_are_in_flight_at_once(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    release = threading.Event()
    server.worker.submit(release.wait, 20)
    drawn: list[Any] = []
    prompts = random_prompts([4] * 12)
    asking = threading.Thread(target=lambda: drawn.extend(engine.generate(prompts, Sampling(max_tokens=4, n=2))))
    asking.start()
    wait_for(lambda: server.paths().count("asample") == 12)
    assert not drawn
    release.set()
    asking.join(30)
    assert [len(group) for group in drawn] == [2] * 12


def test_sampling_follows_its_options_and_its_seed(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    same = random_prompts([4])[0]
    sampling = Sampling(max_tokens=6, n=3, temperature=0.7, top_p=0.9, top_k=5, seed=11)
    first, second = engine.generate([same, same], sampling)
    assert [c.token_ids_T.tolist() for c in first] != [c.token_ids_T.tolist() for c in second]
    again = engine.generate([same, same], sampling)
    assert [c.token_ids_T.tolist() for c in again[0]] == [c.token_ids_T.tolist() for c in first]
    asked = next(body for path, body in server.seen if path == "asample")["sampling_params"]
    assert {key: asked[key] for key in ("max_tokens", "temperature", "top_p", "top_k", "stop")} == {
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": [2],
    }
    assert all(c.entropies_T is None and len(c.logprobs_T) == len(c.token_ids_T) for c in (*first, *second))


def test_temperature_zero_is_asked_for_as_such_and_is_greedy(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    prompts = random_prompts([4, 7])
    first, second = (engine.generate(prompts, Sampling(max_tokens=6, temperature=0.0, seed=seed)) for seed in (1, 2))
    assert [g[0].token_ids_T.tolist() for g in first] == [g[0].token_ids_T.tolist() for g in second]
    asked = next(body for path, body in server.seen if path == "asample")["sampling_params"]
    assert asked["temperature"] == 0.0


class Conversations:
    """A queue of turns whose next one is asked when the one before is answered."""

    def __init__(self, prompts: list[Any], rounds: int) -> None:
        self.pending: queue.Queue[Turn | None] = queue.Queue()
        self.answers: list[Completion | BaseException] = []
        self.left = len(prompts) * rounds
        self.rounds = rounds
        for number, prompt in enumerate(prompts):
            self.ask(prompt, number, rounds)

    def ask(self, prompt: Any, number: int, rounds: int) -> None:
        answer: Future[Completion] = Future()
        sampling = Sampling(max_tokens=5, seed=100 * number + rounds)
        answer.add_done_callback(lambda done: self.answered(done, prompt, number, rounds))
        self.pending.put(Turn(prompt, sampling, answer))

    def answered(self, done: Future[Completion], prompt: Any, number: int, rounds: int) -> None:
        self.answers.append(done.exception() or done.result())
        self.left -= 1
        if rounds > 1 and done.exception() is None:
            self.ask(np.concatenate([prompt, done.result().token_ids_T]), number, rounds - 1)
        elif self.left == 0 or done.exception() is not None:
            self.pending.put(None)

    def take(self, wait: bool) -> list[Turn]:
        turn = self.pending.get(timeout=30)
        return [] if turn is None else [turn]


def test_conversations_are_served_turn_by_turn(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    assert isinstance(engine, StreamingEngine)
    turns = Conversations(random_prompts([3, 5, 7]), rounds=3)
    engine.serve(turns)
    assert len(turns.answers) == 9
    assert all(isinstance(answer, Completion) for answer in turns.answers)


def test_a_turn_that_fails_says_so_to_its_conversation(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    assert isinstance(engine, StreamingEngine)
    server.faults["asample"] = refuse(422, "no such thing")
    turns = Conversations(random_prompts([3]), rounds=1)
    engine.serve(turns)
    assert isinstance(turns.answers[0], BackendError) and "no such thing" in str(turns.answers[0])


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(server: TinkerServer, tmp_path: Path) -> None:
    whole, _ = train_quietly(config_for(server, tmp_path, logging__log_dir=str(tmp_path / "whole")))
    assert len([row for row in rows(whole.log_dir) if row["num_datums"]]) >= 3
    config = config_for(server, tmp_path)
    server.faults["optim_step"] = on_call(4, refuse(422, "the machine fell over"))
    with pytest.raises(BackendError, match="the machine fell over"):
        train_quietly(config)
    server.faults.clear()
    assert len(rows(tmp_path / "logs")) == 3
    resumed = config.model_copy(update={"resume": type(config.resume)(from_=str(tmp_path / "logs"))})
    server.seen.clear()
    train_quietly(resumed)
    assert [row["step"] for row in rows(tmp_path / "logs")] == [0, 1, 2, 3]
    assert rows_without_times(tmp_path / "logs") == rows_without_times(whole.log_dir)
    # One model was made, from the state with its optimizer, and no fresh one beside it.
    assert server.paths().count("create_model") == 1
    assert [body["optimizer"] for path, body in server.seen if path == "load_weights"] == [True]


@pytest.mark.slow
def test_an_interrupt_while_sampling_saves_and_exits_130(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__save_every=100)

    def interrupt() -> None:
        import signal

        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    server.faults["asample"] = on_call(5, interrupt)
    assert run_file(config, tmp_path) == 130
    server.faults.clear()
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (2, "interrupted")
    assert run_file(config, tmp_path, "--resume", str(tmp_path / "logs")) == 0
    assert [row["step"] for row in rows(tmp_path / "logs")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_states_beyond_keep_are_deleted_from_the_service(server: TinkerServer, tmp_path: Path) -> None:
    train_quietly(config_for(server, tmp_path, training__save_every=1, training__keep=1))
    # One more than is kept: the newest was not yet sealed when the rest was tidied up.
    assert [path.rpartition("/")[2][:11] for path in server.states] == ["step_000003", "step_000004"]


@pytest.mark.slow
def test_a_service_that_cannot_delete_is_reported_and_ignored(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__save_every=1, training__keep=1)
    original = server.answer_checkpoint
    server.answer_checkpoint = lambda method, parts: refuse(405, "not here")() or original(method, parts)  # type: ignore[method-assign]
    _, printed = train_quietly(config)
    assert "could not be deleted" in printed


def test_with_async_steps_the_sampler_lags_and_the_loss_is_a_placeholder(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__async_steps=1)
    backend = backend_for(config)
    assert backend.capabilities.reports_late
    datums = off_policy_datums(config)
    backend.sampler(0)
    first_client = backend.engine.client
    assert backend.train_step(datums, 0) == {"loss": 0.0, "staleness": 0}
    backend.sampler(1)
    assert backend.engine.client is first_client, "step 1 is sampled before step 0 is trained"
    reported = backend.train_step(datums, 1)
    assert reported["grad_norm"] is not None
    backend.sampler(2)
    assert backend.engine.client is not first_client
    # The end of a run asks for the step after next, which must have every update.
    backend.sampler(3)
    assert server.paths().count("save_weights_for_sampler") == 3
    torch.testing.assert_close(
        server.sampling["sampling-3"], dict(server.trainees["run-1"].policy.adapter_state()), rtol=0, atol=0
    )


@pytest.mark.slow
def test_with_async_steps_every_row_has_its_own_steps_numbers(server: TinkerServer, tmp_path: Path) -> None:
    _, printed = train_quietly(config_for(server, tmp_path, training__async_steps=1))
    metrics = rows(tmp_path / "logs")
    losses = [
        float(re.findall(r"loss=(\S+) \(placeholder\)", line)[0]) for line in printed.splitlines() if "Step " in line
    ]
    assert [row["loss_is_placeholder"] for row in metrics] == [False] * len(metrics)
    assert all(row["grad_norm"] is not None for row in metrics)
    # Where nothing is awaited, such as a last checkpoint, a step is sampled before the one before it is trained.
    assert [row["staleness"] for row in metrics[:3]] == [0, 1, 1]
    assert all(row["lr"] > 0 for row in metrics)
    # What the screen shows a step late.
    assert losses[0] == 0.0
    assert losses[1:] == pytest.approx([row["loss"] for row in metrics[:-1]], abs=1e-4)


def test_a_step_without_data_has_no_ratio_of_the_step_before(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__async_steps=1)
    backend = backend_for(config)
    backend.sampler(0)
    backend.train_step(off_policy_datums(config), 0)
    backend.sampler(1)
    assert backend.train_step([], 1)["ratio_max"] is not None, "that of the first step"
    settled = backend.settle()
    assert settled["ratio_max"] is None and settled["kl_sample_train"] is None and settled["loss"] == 0.0


def test_a_step_that_failed_late_is_not_saved_as_done(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__async_steps=1)
    backend = backend_for(config)
    backend.sampler(0)
    server.faults["optim_step"] = refuse(422, "no")
    backend.train_step(off_policy_datums(config), 0)
    with pytest.raises(BackendError, match="no"):
        backend.sampler(2)
    with pytest.raises(BackendError, match="no consistent state to save"):
        backend.save(tmp_path)


def test_a_step_without_rows_asks_nothing_of_the_service(server: TinkerServer, tmp_path: Path) -> None:
    backend = backend_for(config_for(server, tmp_path))
    backend.sampler(0)
    asked = len(server.seen)
    assert backend.train_step([], 0)["loss"] == 0.0
    backend.sampler(1)
    assert len(server.seen) == asked


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"lora__alpha": 7}, "[lora] alpha"),
        ({"lora__dropout": 0.1}, "[lora] dropout"),
        ({"lora__target_modules": "q_proj"}, "[lora] target_modules"),
        ({"training__min_p": 0.1}, "[training] min_p"),
        ({"training__repetition_penalty": 1.1}, "[training] repetition_penalty"),
        ({"kl__beta": 0.1}, "[kl] beta"),
        ({"loss__type": "ppo", "loss__ratio_cap": 3.0}, "[loss] ratio_cap"),
        ({"loss__type": "gspo", "loss__ratio_cap": 1.5}, "[loss] ratio_cap"),
        ({"loss__type": "grpo"}, "[loss] type"),
        ({"algorithm__uncertainty_kind": "shannon_entropy"}, "[algorithm] uncertainty_kind"),
    ],
)
def test_what_the_service_cannot_do_is_rejected(
    server: TinkerServer, tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as rejected:
        backend_for(config_for(server, tmp_path, **overrides))
    assert named in str(rejected.value)
    assert not server.seen


def test_a_loss_that_the_service_lacks_is_rejected_with_those_that_it_has(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_file(config_for(server, tmp_path, loss__type="grpo"), tmp_path) == 2
    printed = capsys.readouterr()
    assert '[loss] type = "grpo" is not possible with Tinker' in printed.err
    assert "Try: importance_sampling, ppo, cispo, gspo, dr_grpo" in printed.err
    assert "Loading" not in printed.out, "before anything is loaded"


def test_a_custom_loss_without_an_equivalent_is_rejected_up_front(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tinkerless.py").write_text(
        "from retrain.losses.ppo import PPO\nclass Mine(PPO):\n    def on_tinker(self):\n        return None\n"
    )
    config = config_for(server, tmp_path, loss__type="tinkerless.Mine", plugins__search_paths=(str(tmp_path),))
    assert run_file(config, tmp_path) == 2
    printed = capsys.readouterr()
    assert '[loss] type = "tinkerless.Mine" is not possible with Tinker' in printed.err
    assert "Loading" not in printed.out


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        ({"loss__type": "ppo"}, True),
        ({"loss__type": "cispo"}, False),
        *slow(
            ({"loss__type": "gspo"}, True),
            ({"loss__type": "dr_grpo"}, True),
            ({"loss__type": "ppo", "loss__ratio_cap": 0.0}, False),
            ({"loss__type": "importance_sampling"}, False),
        ),
    ],
)
def test_a_cap_that_the_service_does_not_apply_is_reported(
    server: TinkerServer, tmp_path: Path, loss: dict[str, Any], ignored: bool
) -> None:
    logged: list[str] = []
    backend_for(config_for(server, tmp_path, **loss), logged)
    ignored_lines = [line for line in logged if line.startswith("Ignored with Tinker: [loss] ratio_cap = 2; its ")]
    assert len(ignored_lines) == int(ignored)


def test_a_custom_uncertainty_that_needs_entropies_is_rejected_by_the_name_of_the_backend(
    server: TinkerServer, tmp_path: Path
) -> None:
    (tmp_path / "entropic.py").write_text(
        "from retrain.advantages.uncertainty import Uncertainty\n"
        "mine = Uncertainty('mine', lambda context: context.entropies, needs_entropies=True)\n"
    )
    custom = {"algorithm__uncertainty_kind": "entropic.mine", "plugins__search_paths": (str(tmp_path),)}
    with pytest.raises(ConfigError, match="which the tinker engine does not return"):
        train_quietly(config_for(server, tmp_path, **custom))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("", "TINKER_API_KEY is not set"),
        ("sk-123456", 'must start with "tml-"'),
        ("tml-of-somebody-else", "rejected the API key (status 401"),
    ],
)
def test_a_bad_key_is_wrong_input_and_is_never_shown(
    server: TinkerServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
    expected: str,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_file(config_for(server, tmp_path), tmp_path) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert not key or key not in error


def test_a_key_that_the_service_echoes_is_cut_from_the_message(server: TinkerServer, tmp_path: Path) -> None:
    server.faults["create_model"] = refuse(422, f"who is {KEY}?")
    with pytest.raises(BackendError) as rejected:
        backend_for(config_for(server, tmp_path))
    assert "who is ***?" in str(rejected.value) and KEY not in str(rejected.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9", "[Errno 111] Connection refused."), ("http://nowhere.invalid", "[Errno -")],
)
def test_a_service_that_is_not_there_is_reported_before_anything_is_loaded(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, reason: str
) -> None:
    assert run_file(config_for(server, tmp_path, model__base_url=url), tmp_path) == 1
    output = capsys.readouterr()
    assert f"no Tinker service answers at {url}: {reason}" in output.err
    assert "Loading" not in output.out


def test_a_service_that_takes_connections_and_answers_nothing_is_waited_for(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retrain.backends.tinker.service.START_PATIENCE_S", 0.2)
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as silent:
        threading.Thread(target=silent.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{silent.server_address[1]}"
        assert run_file(config_for(server, tmp_path, model__base_url=url), tmp_path) == 1
        silent.shutdown()
    output = capsys.readouterr()
    assert f"Nothing answers at {url} yet" in output.out
    assert f"no Tinker service answers at {url}.  Try: check [model] base_url" in output.err


def test_an_address_without_a_scheme_is_wrong_input(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config_for(server, tmp_path)).replace(server.url, "localhost:8000"))
    assert run([str(path)]) == 2
    assert "[model] base_url" in capsys.readouterr().err


def test_the_address_may_come_from_the_environment(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url + "/")
    backend = backend_for(config_for(server, tmp_path, model__base_url=""))
    assert backend.service.url == server.url


def test_a_service_that_goes_away_ends_the_run_with_a_sentence(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    service = engine.service  # type: ignore[attr-defined]
    service.patience_s = service.health_check_s = 0.2
    server.stop()
    with pytest.raises(BackendError, match=r"has not answered for .* \(while sampling\)"):
        engine.generate(random_prompts([4]), Sampling(max_tokens=4, n=2))
    server.http = type(server.http)(("127.0.0.1", 0), server.http.RequestHandlerClass)
    server.thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    server.thread.start()


def test_a_service_that_is_slow_but_there_is_waited_for(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    service = engine.service  # type: ignore[attr-defined]
    service.patience_s = service.health_check_s = 0.1
    server.worker.submit(time.sleep, 1.0)
    assert len(engine.generate(random_prompts([4]), Sampling(max_tokens=4, n=2))[0]) == 2


def test_a_busy_service_is_asked_again(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    server.faults["asample"] = on_call(1, refuse(429, "busy"))
    assert len(engine.generate(random_prompts([4]), Sampling(max_tokens=4, n=2))[0]) == 2
    assert server.paths().count("asample") == 2


def test_completions_without_logprobs_are_rejected(server: TinkerServer, tmp_path: Path) -> None:
    engine = backend_for(config_for(server, tmp_path)).sampler(0)
    original = TinkerServer.asample

    def strip(service: TinkerServer, body: Any) -> Any:
        response = original(service, body)
        for sequence in response.sequences:
            sequence.ClearField("logprobs")
        return response

    from . import tinker_server

    tinker_server.WORK["asample"] = strip
    try:
        with pytest.raises(RolloutError, match="without log-probs"):
            engine.generate(random_prompts([4]), Sampling(max_tokens=4, n=2))
    finally:
        tinker_server.WORK["asample"] = original


def test_a_model_that_the_service_does_not_have_is_wrong_input(server: TinkerServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'builtin:tiny' is not offered .* It has: "):
        backend_for(config_for(server, tmp_path, model__model="builtin:tiny"))


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ({}, KEY, "accepts the key and has "),
        ({}, "tml-of-somebody-else", "rejected the API key (status 401, while asking what it offers)"),
        ({"model__model": "builtin:tiny"}, KEY, "[model] model = 'builtin:tiny' is not offered by http://127.0.0.1:"),
        (
            {"teaching__enabled": True, "teaching__student_model": "builtin:tiny"},
            KEY,
            "[teaching] student_model = 'builtin:tiny' is not offered by http://127.0.0.1:",
        ),
        ({"model__base_url": "http://127.0.0.1:9"}, KEY, "the Tinker service at http://127.0.0.1:9 does not respond: "),
        ({}, "", "responds"),
    ],
)
def test_doctor_asks_the_service_what_it_offers(
    server: TinkerServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    key: str,
    expected: str,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_for(server, tmp_path, **options)
    attempt = dict(trial._trials(config))["[backend] backend"]
    try:
        found = attempt(config)
    except RetrainError as error:
        found = str(error)
        assert "Try: " in found
    assert expected in found
    assert not {"create_session", "create_model"} & set(server.paths()), "nothing is created"


def test_doctor_waits_only_seconds_for_a_service_that_cannot_say(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.cli.trial_servers.OFFER_S", 0.5)
    server.faults["get_server_capabilities"] = refuse(503, "too busy")
    config = config_for(server, tmp_path)
    with pytest.raises(RetrainError, match=r"did not say within 0 s what it offers"):
        dict(trial._trials(config))["[backend] backend"](config)


def test_the_context_is_the_services_or_else_the_models(server: TinkerServer, tmp_path: Path) -> None:
    server.context = 77
    assert backend_for(config_for(server, tmp_path)).capabilities.context_length == 77
    server.context = None
    assert backend_for(config_for(server, tmp_path)).capabilities.context_length == 256


@pytest.mark.slow
def test_a_state_of_another_run_is_rejected(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path)
    train_quietly(config)
    other = config_for(server, tmp_path, model__lora_rank=8, resume__from=str(tmp_path / "logs"))
    with pytest.raises(CheckpointError, match=r"belongs to another run: it has .* and rank 4"):
        train_quietly(other, force_resume=True)


@pytest.mark.slow
def test_a_state_that_is_gone_is_reported(server: TinkerServer, tmp_path: Path) -> None:
    train_quietly(config_for(server, tmp_path))
    server.states.clear()
    with pytest.raises(CheckpointError, match="no longer exists"):
        train_quietly(config_for(server, tmp_path, resume__from=str(tmp_path / "logs")))


def test_a_local_checkpoint_cannot_be_resumed_on_the_service(server: TinkerServer, tmp_path: Path) -> None:
    backend = backend_for(config_for(server, tmp_path, resume__from="somewhere"))
    with pytest.raises(CheckpointError, match="was not saved by the tinker backend"):
        backend.load(tmp_path)


def test_without_the_sdk_the_extra_is_named(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(None, {"backend.backend": "tinker", "model.model": str(tiny)})
    with pytest.raises(MissingExtraError, match=r"pip install -e \".*\[tinker\]\""):
        build(config, None, lambda line: None, lambda phase, done, total: None)


# No finder finds these any more, as on a machine without them.
WITHOUT_TORCH = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "peft", "accelerate", "triton"):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from retrain.cli import run
code = run(sys.argv[1:])
assert not {"torch", "peft"} & set(sys.modules), "something brought it in"
sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_needs_no_torch(server: TinkerServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, training__max_steps=2, eval__every=2, eval__max_examples=2)
    (tmp_path / "run.toml").write_text(dump_config(config))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "logs")) == 2


def refuse(status: int, text: str) -> Callable[[], None]:
    def fault() -> None:
        raise Refused(status, text)

    return fault


def on_call(number: int, fault: Callable[[], None]) -> Callable[[], None]:
    """Only the nth call meets the fault."""
    calls = [0]

    def counted() -> None:
        calls[0] += 1
        if calls[0] == number:
            fault()

    return counted


def teaching_config(server: TinkerServer, folder: Path, **overrides: Any) -> TrainConfig:
    own = {
        "algorithm__advantage_mode": "grpo",
        "teaching__enabled": True,
        "teaching__max_probe_tokens": 4,
        "teaching__student_diagnostic_template": "{question}",
        "teaching__teacher_adaptive_template": "{question} {approach}",
        "teaching__student_with_teaching_template": "{question} {teaching}",
    }
    return config_for(server, folder, **(own | overrides))


@pytest.mark.slow
def test_the_student_of_a_teacher_is_a_base_model_of_the_service(server: TinkerServer, tmp_path: Path) -> None:
    config = teaching_config(server, tmp_path, training__max_steps=2)
    _, printed = train_quietly(config)
    assert f"Student: {server.base_model}, on the service." in printed
    (made,) = [body for name, body in server.seen if name == "create_sampling_session"]
    assert (made["base_model"], made.get("model_path")) == (server.base_model, None)
    for row in rows(tmp_path / "logs"):
        assert 0 <= row["baseline_accuracy"] <= 1 and row["teaching_length"] <= 8
    samples = [body for name, body in server.seen if name == "asample"]
    student = [body for body in samples if body["num_samples"] == 1]
    # Two questions a step alone and probed, and eight lessons.
    assert len(student) == 2 * (2 + 2 + 8) and len(samples) == len(student) + 2 * 2


def test_what_the_student_draws_on_the_service_depends_on_seed_and_prompt(server: TinkerServer, tmp_path: Path) -> None:
    config = teaching_config(server, tmp_path)
    backend = backend_for(config)
    lent = backend.frozen(config, load_tokenizer(config.model.model), lambda line: None, lambda *_: None)
    assert lent.context_length == server.context
    sampling, prompts = Sampling(max_tokens=6, seed=4), random_prompts([5, 7, 3])
    together = lent.engine.generate(prompts, sampling)
    backwards = lent.engine.generate(prompts[::-1], sampling)[::-1]
    assert [c.token_ids_T.tolist() for (c,) in together] == [c.token_ids_T.tolist() for (c,) in backwards]


def test_a_student_that_the_service_does_not_offer_is_rejected(server: TinkerServer, tmp_path: Path) -> None:
    config = teaching_config(server, tmp_path, teaching__student_model="builtin:tiny")
    with pytest.raises(ConfigError, match=r"\[teaching\] student_model = 'builtin:tiny' is not offered by"):
        train_quietly(config)
