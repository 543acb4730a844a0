from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from e2e.tiny import PlainTokenizer, config_for, policy_for, random_datums, random_prompts

from retrain.backends.local import LocalBackend, build, make_engine, resolve_devices
from retrain.backends.local.split import SplitBackend
from retrain.cli import run
from retrain.errors import ConfigError
from retrain.modeling.policy import choose_dtype, load_policy
from retrain.types import Completion, Sampling

SAMPLING = Sampling(max_tokens=8, n=3, temperature=0.9, seed=1)


def quiet(*_: Any) -> None:
    """Nobody listens."""


BUILT: list[Any] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No backend trains on beside the next test."""
    yield
    while BUILT:
        with contextlib.suppress(Exception):
            BUILT.pop().close(None)


def build_on(tiny: Path, devices: str, **overrides: Any) -> Any:
    backend = build(config_for(tiny, backend__devices=devices, **overrides), PlainTokenizer(), quiet, quiet)
    BUILT.append(backend)
    return backend


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("cpu", 0, ["cpu"]),
        ("cpu,cpu", 0, ["cpu", "cpu"]),
        ("gpu:0", 1, ["cuda:0"]),
        ("gpu:0, gpu:1", 2, ["cuda:0", "cuda:1"]),
        ("gpu:1,gpu:0", 2, ["cuda:1", "cuda:0"]),
        ("gpu:0,cpu", 1, ["cuda:0", "cpu"]),
        ("auto", 2, ["cuda:0"]),
        ("auto", 0, ["cpu"]),
    ],
)
def test_devices_are_those_of_the_file(
    text: str, gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    logged: list[str] = []
    assert [str(device) for device in resolve_devices(text, logged.append)] == expected
    on_cpu = ['Warning: devices = "auto" found no GPU, so this run is on the CPU.']
    assert logged == (on_cpu if (text, gpus) == ("auto", 0) else [])


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("gpu:0", 0, 'devices = "gpu:0", but PyTorch finds no GPU here.  Try: devices = "cpu", or devices = "auto"'),
        ("gpu:0,gpu:1", 1, 'devices = "gpu:0,gpu:1", but PyTorch finds 1 GPU here.  Try: devices = "gpu:0"'),
        ("gpu:3", 2, 'devices = "gpu:3", but PyTorch finds 2 GPUs here.  Try: devices = "gpu:0"'),
    ],
)
def test_a_gpu_that_is_not_there_is_rejected(
    text: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError) as rejected:
        resolve_devices(text, quiet)
    assert f"[backend] {message}" in str(rejected.value)


def test_a_file_without_devices_on_a_machine_without_a_gpu_gets_the_line_to_write_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    short = '[model]\nmodel = "builtin:tiny"\n[data]\nsource = "arithmetic"\n[training]\nmax_tokens = 64\n'
    (tmp_path / "retrain.toml").write_text(short)
    assert run([]) == 2
    printed = capsys.readouterr()
    assert 'Try: devices = "cpu", or devices = "auto"' in printed.err
    assert printed.out == ""
    assert not (tmp_path / "logs").exists()
    (tmp_path / "retrain.toml").write_text(f"{short}[campaign]\nseeds = [1]\n")
    assert run([]) == 2
    assert 'Try: devices = "cpu", or devices = "auto"' in capsys.readouterr().err


def test_a_cloned_policy_keeps_the_reason_why_it_attends_by_itself(tiny: Path) -> None:
    policy = policy_for(config_for(tiny), trained=False)
    policy.attention_fallback_reason = "this model attends by itself"
    assert policy.clone_with_new_adapter().attention_fallback_reason == "this model attends by itself"


def test_one_device_samples_and_trains_in_turn(tiny: Path, tmp_path: Path) -> None:
    backend = build_on(tiny, "cpu")
    assert isinstance(backend, LocalBackend)
    assert not backend.capabilities.reports_late
    assert backend.capabilities.gives_entropies
    assert backend.capabilities.context_length == 256
    before = backend.sampler(0).generate(random_prompts((5,)), SAMPLING)
    backend.save(tmp_path)
    for step in range(4):
        backend.train_step(random_datums([(4, 9), (3, 5)]), step)
    after = backend.sampler(4).generate(random_prompts((5,)), SAMPLING)
    assert not same_logprobs(before, after), "the engine sees the newest weights"
    backend.load(tmp_path)
    assert same_logprobs(before, backend.sampler(0).generate(random_prompts((5,)), SAMPLING))


def same_logprobs(a: list[list[Completion]], b: list[list[Completion]]) -> bool:
    pairs = [(x, y) for g, h in zip(a, b, strict=True) for x, y in zip(g, h, strict=True)]
    return all(np.array_equal(x.logprobs_T, y.logprobs_T) for x, y in pairs)


def test_the_start_up_lines_are_the_documented_ones(tiny: Path) -> None:
    logged: list[str] = []
    build(config_for(tiny), PlainTokenizer(), logged.append, quiet)
    assert logged[0] == f"Loading train model: {tiny} on cpu..."
    assert logged[1].startswith("trainable params: ")
    assert logged[2] == "Engine: pytorch on cpu, eager, sdpa attention, fp32 weights, fp32 cache"
    assert logged[3] == "LocalTrainHelper ready (engine=pytorch, split_mode=False)."


def test_a_model_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"could not be loaded.*point at the folder"):
        build(config_for(tmp_path / "nowhere"), PlainTokenizer(), quiet, quiet)


def test_a_folder_without_a_model_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"could not be loaded.*check the files there"):
        build(config_for(tmp_path), PlainTokenizer(), quiet, quiet)


def steps(backend: Any, first: int, last: int) -> list[Any]:
    """Sample, then train; what the sampler drew and what the step reported."""
    seen = []
    for step in range(first, last):
        drawn = backend.sampler(step).generate(random_prompts((5,), seed=step), SAMPLING)
        reported = backend.train_step(random_datums([(4, 9), (3, 5)], seed=step), step)
        seen.append(([c.logprobs_T.tolist() for group in drawn for c in group], reported))
    return seen


def test_in_split_mode_the_sampler_is_exactly_one_step_behind(tiny: Path) -> None:
    split, plain = build_on(tiny, "cpu,cpu"), build_on(tiny, "cpu")
    assert isinstance(split, SplitBackend)
    assert split.capabilities.reports_late
    weights, losses = [], [0.0]
    for step in range(4):
        weights.append({name: tensor.clone() for name, tensor in plain.learner.policy.adapter_state().items()})
        # Step n is sampled from the weights after n - 1 updates, whatever the other thread has come to.
        split.sampler(step)
        behind, expected = split.mirror.adapter_state(), weights[max(0, step - 1)]
        assert all(torch.equal(behind[name], expected[name]) for name in expected)
        datums = random_datums([(4, 9), (3, 5)], seed=step)
        assert split.train_step(datums, step)["loss"] == losses[step]
        losses.append(plain.train_step(datums, step)["loss"])


@pytest.mark.parametrize("resumes", [False, True])
def test_in_split_mode_a_step_without_an_update_makes_the_sampler_no_staler(
    tiny: Path, tmp_path: Path, resumes: bool
) -> None:
    split, seen = build_on(tiny, "cpu,cpu"), []
    for step in range(5):
        split.sampler(step)
        # Step 2 has no data.
        datums = random_datums([(4, 9), (3, 5)], seed=step) if step != 2 else []
        seen.append(split.train_step(datums, step)["staleness"])
        if step == 2 and resumes:
            split.save(tmp_path)
            split = build_on(tiny, "cpu,cpu")
            split.load(tmp_path)
    assert seen == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("cut", [2, *slow(1, 3)])
def test_split_mode_resumes_to_the_bit(tiny: Path, tmp_path: Path, cut: int) -> None:
    whole = steps(build_on(tiny, "cpu,cpu"), 0, 5)
    first = build_on(tiny, "cpu,cpu")
    begun = steps(first, 0, cut)
    first.save(tmp_path)
    second = build_on(tiny, "cpu,cpu")
    second.load(tmp_path)
    assert begun + steps(second, cut, 5) == whole
    # Saving waits for the step under way, and changes nothing for a run that goes on.
    assert begun + steps(first, cut, 5) == whole


def test_split_mode_restores_the_setting_of_pytorch(tiny: Path) -> None:
    torch.use_deterministic_algorithms(False)
    split = build_on(tiny, "cpu,cpu")
    assert torch.are_deterministic_algorithms_enabled()
    split.close(None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_on_the_training_thread_is_raised_at_the_next_step(tiny: Path) -> None:
    backend = build_on(tiny, "cpu,cpu")

    def fail(*_: Any) -> Any:
        raise RuntimeError("the other thread")

    backend.learner.step = fail
    backend.train_step([], 0)
    with pytest.raises(RuntimeError, match="the other thread"):
        backend.train_step([], 1)


@pytest.mark.parametrize("capable", [False, True])
def test_a_cpu_that_emulates_bf16_is_warned_of(tiny: Path, monkeypatch: pytest.MonkeyPatch, capable: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: capable)
    logged: list[str] = []
    config = config_for(tiny, model__dtype="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_policy(config.model, config.lora, 0, torch.device("cpu"), logged.append)
    assert any("does not compute in bf16" in line for line in logged) is not capable


@pytest.mark.parametrize("overlap", ["auto", True])
def test_a_policy_that_is_trained_while_it_is_sampled_is_not_merged_in_place(tiny: Path, overlap: Any) -> None:
    config = config_for(tiny, training__overlap=overlap)
    policy = policy_for(config)
    make_engine(config, policy, PlainTokenizer(), print, lambda *_: None)
    assert policy.is_trained_while_sampled == (overlap is True)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_a_gpu_without_bf16_gets_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    logged: list[str] = []
    assert choose_dtype("auto", torch.device("cuda"), logged.append) == dtype
    assert any("twice the memory" in line for line in logged) == (capability < (8, 0))
    assert choose_dtype("bf16", torch.device("cuda"), logged.append) == torch.bfloat16
    assert any("this GPU does not compute in bf16, so bf16 is emulated" in line for line in logged) == (
        capability < (8, 0)
    )
    assert choose_dtype("auto", torch.device("cpu"), logged.append) == torch.float32
