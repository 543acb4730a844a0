"""Checks before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import slow

from retrain.builtin import resolve_model
from retrain.checks import preflight
from retrain.cli import run
from retrain.cli.doctor import _check_model
from retrain.config import load_config
from retrain.config.reference import starter
from retrain.errors import ConfigError

HERE = {"backend.devices": "cpu", "model.model": "builtin:tiny", "data.source": "arithmetic", "training.max_tokens": 32}
KEYS = ("WANDB_API_KEY", "WANDB_MODE", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "HF_HUB_OFFLINE", "HF_ENDPOINT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for key in KEYS:
        # Set and removed again, so that monkeypatch takes away what a test puts there.
        monkeypatch.setenv(key, "x")
        monkeypatch.delenv(key)
    asked = preflight.hub_answers
    asked.cache_clear()
    yield tmp_path
    asked.cache_clear()


def check(**options: Any) -> str:
    """The error, or ""."""
    try:
        preflight.check_before_loading(
            load_config(None, HERE | {key.replace("__", "."): value for key, value in options.items()})
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend__backend": "tinker"}, "is not possible with Tinker: The service returns no entropies."),
        ({"inference__engine": "vllm"}, 'is not possible with [inference] engine = "vllm": A server returns no entr'),
    ],
)
def test_entropies_are_missed_before_anything_is_loaded(
    folder: Path, options: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", value)]
    (folder / "retrain.toml").write_text(starter("demo"))
    assert run(["explain", *flags, "--uncertainty-kind", "shannon_entropy"]) == 1
    shown = capsys.readouterr().out
    assert f'[algorithm] uncertainty_kind = "shannon_entropy" {text}' in " ".join(shown.split())
    assert "Try: surprisal, predictive_variance" in " ".join(shown.split())
    assert run([*flags, "--uncertainty-kind", "shannon_entropy"]) == 2
    run(["explain", *flags])
    assert "entropies" not in capsys.readouterr().out


def test_a_sound_configuration_passes_without_a_word(folder: Path) -> None:
    assert check() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model__model": "./nowhere"}, '[model] model = "./nowhere": no such folder.'),
        ({"model__model": "a/b/c"}, '[model] model = "a/b/c": no such folder.'),
        ({"model__model": __file__}, "is a file, not the folder of a model.  Try: the folder that holds it"),
        ({"model__model": "models/"}, '[model] model = "models/": no such folder.'),
        ({"backend__devices": "cpu", "inference__dtype": "fp8"}, '[inference] dtype = "fp8" needs a GPU.'),
        (
            {"backend__devices": "cpu", "inference__attention_kernel": "triton"},
            '[inference] attention_kernel = "triton" needs a GPU.',
        ),
        ({"teaching__enabled": True, "teaching__student_model": "~/s"}, "[teaching] student_model"),
        (
            {"training__max_tokens": 256},
            "[training] max_tokens = 256 and a prompt do not fit the model's context of 256",
        ),
        ({"data__source": "jsonl", "data__path": "no.jsonl"}, '[data] path = "no.jsonl": there is no file no.jsonl'),
        (
            {"eval__every": 1, "eval__source": "jsonl", "eval__path": "no.jsonl"},
            '[eval] path = "no.jsonl": there is no file no.jsonl',
        ),
        ({"logging__wandb_project": "p"}, '[logging] wandb_project = "p" needs a key'),
        (
            {"inference__engine": "openai", "training__top_k": 5},
            '[training] top_k = 5 is not supported by engine = "openai"',
        ),
        (
            {"training__overlap": True},
            "[training] overlap = true is not possible: the engine returns the completions of a step together.",
        ),
        (
            {"training__overlap": True, "backend__devices": "auto"},
            "[training] overlap = true is not possible: the engine returns the completions of a step together.",
        ),
        ({"backend__backend": "tinker"}, '[backend] backend = "tinker" needs a key, and TINKER_API_KEY is not set.'),
    ],
)
def test_what_would_end_the_run_is_named_with_what_to_do(options: dict[str, Any], text: str) -> None:
    assert text in check(**options)


def test_keys_count_wherever_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as only:
            only.setenv(name, value)
            assert check(logging__wandb_project="p") == ""
    with monkeypatch.context() as only:
        only.setenv("WANDB_MODE", "ofline")
        assert 'WANDB_MODE = "ofline" is not a mode of wandb.  Try: one of online, offline' in check(
            logging__wandb_project="p"
        )
        only.setenv("WANDB_MODE", "offline")
        for project, problem in (
            (
                "team/name",
                'must not contain /, got "team/name".  Try: wandb_entity = "team" and wandb_project = "name"',
            ),
            ("a/b#", 'must not contain # /, got "a/b#".  Try: another name'),
            ("n" * 129, "must not have more than 128 characters"),
        ):
            assert problem in check(logging__wandb_project=project)
        assert check(logging__wandb_project="my project_1.2-3") == ""
        only.setenv("WANDB_MODE", "")
        assert 'WANDB_MODE = "" is not a mode of wandb' in check(logging__wandb_project="p")
    (folder / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert check(logging__wandb_project="p") == ""
    with monkeypatch.context() as only:
        only.setenv("TINKER_API_KEY", "tml-k")
        assert check(backend__backend="tinker") == ""
        only.setenv("TINKER_API_KEY", "sk-k")
        assert 'must start with "tml-"' in check(backend__backend="tinker")
    (folder / ".tinker").mkdir()
    (folder / ".tinker" / "credentials.json").write_text("{}")
    assert check(backend__backend="tinker") == ""


def test_an_environment_cuts_what_is_too_long_by_itself() -> None:
    assert check(environment__provider="builtin", environment__id="guess-number", training__max_tokens=5000) == ""


def test_all_issues_are_reported_at_once() -> None:
    error = check(model__model="./nowhere", logging__wandb_project="p", data__source="jsonl", data__path="no.jsonl")
    assert error.count("\n") == 3


def test_without_the_hub_a_model_that_is_not_cached_is_answered_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        # It takes connections and never answers.
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        began = time.monotonic()
        error = check(model__model="Qwen/Qwen3-4B")
        assert time.monotonic() - began < 5
    assert 'model = "Qwen/Qwen3-4B": no such folder, not in the cache' in error
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_without_the_hub_what_is_cached_is_used_and_nobody_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = folder / "hub" / "models--Qwen--Qwen3-4B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 64}')
    monkeypatch.setattr(preflight, "hub_answers", lambda: False)
    logged: list[str] = []
    preflight.check_before_loading(load_config(None, HERE | {"model.model": "Qwen/Qwen3-4B"}), logged.append)
    assert len(logged) == 1 and "cannot be reached" in logged[0]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "context of 64" in check(model__model="Qwen/Qwen3-4B", training__max_tokens=64)


def test_without_the_hub_a_model_that_is_partly_cached_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Path(resolve_model("builtin:tiny"))
    snapshot = folder / "hub" / "models--acme--partial" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in tiny.iterdir():
        if file.name != "model.safetensors":
            (snapshot / file.name).write_bytes(file.read_bytes())
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"model.norm.weight": shards[0], "lm_head.weight": shards[1]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / shards[0]).write_bytes((tiny / "model.safetensors").read_bytes())
    monkeypatch.setattr(preflight, "hub_answers", lambda: True)
    assert check(model__model="acme/partial") == ""  # the rest is downloaded
    monkeypatch.setattr(preflight, "hub_answers", lambda: False)
    assert f"incomplete in the cache of the Hugging Face Hub, which cannot be reached: it lacks {shards[1]}." in check(
        model__model="acme/partial"
    )
    monkeypatch.setattr("retrain.cli.doctor.hub_answers", lambda: False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    told = _check_model("acme/partial", reads=True)
    assert told.status == "missing" and shards[1] in told.detail and told.fix == "hf download acme/partial"
    (snapshot / shards[1]).write_bytes((snapshot / shards[0]).read_bytes())
    assert check(model__model="acme/partial") == ""


def test_a_server_that_cannot_be_launched_is_reported_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert "there is no vllm command in this environment" in check(inference__engine="vllm", inference__launch=True)
    (folder / "vllm").touch()
    assert check(inference__engine="vllm", inference__launch=True) == ""


@pytest.mark.parametrize("command", ["explain", *slow("doctor")])
def test_epochs_over_a_source_without_end_are_reported(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("retrain.toml").write_text(starter("demo"))
    assert run([command, "--epochs", "2"]) == 1
    assert "these examples have no end" in " ".join(capsys.readouterr().out.split())
    assert run(["explain", "--epochs", "2", "--max-examples", "16"]) == 0


def test_a_dataset_that_cannot_be_had_is_reported_before_libraries_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setattr(preflight, "hub_answers", lambda: False)
    error = check(data__source="gsm8k", eval__every=10)
    assert error.count("needs the dataset openai/gsm8k, which is not in the cache") == 1
    assert "Try: without the Hub, write the rows to a file" in error and "set [data] source" in error
    held_out = check(data__source="arithmetic", eval__every=10, eval__source="gsm8k")
    assert 'and set [eval] source = "jsonl"' in held_out and "[data]" not in held_out
    assert "needs the dataset some/Camel" in check(data__source="hub", data__id="some/CamelCase", eval__every=0)
    assert "needs the dataset squad, which is not in" in check(data__source="hub", data__id="squad", eval__every=0)
    assert "./rows, but there is no such folder" in check(data__source="hub", data__id="./rows", eval__every=0)
    # Formats and folders are no datasets of the Hub.
    (folder / "my" / "rows").mkdir(parents=True)
    assert check(data__source="hub", data__id="json") == check(data__source="hub", data__id="my/rows") == ""


def test_a_cached_dataset_needs_no_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "datasets" / "some___camel_case").mkdir(parents=True)
    (folder / "hub" / "datasets--openai--gsm8k").mkdir(parents=True)
    (folder / "datasets" / "squad").mkdir()
    (folder / "hub" / "datasets--drop").mkdir()
    assert check(data__source="hub", data__id="squad") == check(data__source="hub", data__id="drop") == ""
    assert check(data__source="gsm8k") == check(data__source="hub", data__id="some/CamelCase") == ""


def test_the_hub_is_not_asked_for_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> bool:
        raise AssertionError

    monkeypatch.setattr(preflight, "hub_answers", ask)
    assert check() == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the cache" in check(model__model="Qwen/Qwen3-4B")


def test_libraries_that_were_imported_before_are_configured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    preflight.go_offline()
    assert constants.HF_HUB_OFFLINE is True


def test_issues_are_reported_without_importing_torch(folder: Path) -> None:
    (folder / "run.toml").write_text(starter("demo"))
    program = "import sys; from retrain.cli import run; code = run(['run.toml', '--max-tokens', '999']); "
    done = subprocess.run(
        [sys.executable, "-c", program + "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "2 False False"
    assert "do not fit the model's context of 256" in done.stderr


def test_a_missing_file_is_answered_with_one_of_a_similar_name(folder: Path) -> None:
    missing = {"data__source": "jsonl", "data__path": "data/rows.jsonl", "eval__every": 0}
    assert "Try: check the path, which is relative to the working directory" in check(**missing)
    (folder / "data").mkdir()
    (folder / "data" / "rows_1.jsonl").touch()
    assert 'Try: path = "data/rows_1.jsonl"' in check(**missing)
    held_out = {"eval__every": 1, "eval__source": "jsonl", "eval__path": "data/rows_1.jsonl"}
    assert "rows_1" not in check(**missing | held_out), "problems of an evaluation are not for training"


def test_a_campaign_says_it_before_any_run_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.toml").write_text(starter("demo") + "\n[campaign]\nseeds = [1]\nmax_steps = 1\n")
    assert run(["run.toml", "--max-tokens", "999"]) == 2
    assert "do not fit the model's context of 256" in capsys.readouterr().err
    assert not (folder / "logs").exists()


def test_a_run_does_not_replace_the_model_that_it_starts_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), folder / "model")
    (folder / "link").symlink_to("model")
    text = '[backend] adapter_path = "link/" is the folder of [model] model, which the run would replace.'
    assert text in check(model__model="./model", backend__adapter_path="link/")
    student = {"teaching__enabled": True, "teaching__student_model": "./model"}
    assert "is the folder of [teaching] student_model" in check(**student, backend__adapter_path="~/model")
    assert check(model__model="./model", backend__adapter_path="model/adapter") == ""
    # The service writes no adapter here.
    monkeypatch.setenv("TINKER_API_KEY", "tml-k")
    assert check(model__model="./model", backend__adapter_path="model", backend__backend="tinker") == ""


def test_runs_of_a_campaign_have_adapters_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), folder / "model")
    (folder / "run.toml").write_text(starter("demo") + "\n[campaign]\nseeds = [1]\nmax_steps = 1\n")
    flags = ["--model", "./model", "--adapter-path", "model", "--max-tokens"]
    assert run(["explain", "run.toml", *flags, "32"]) == 0
    # Something else ends it.
    assert run(["run.toml", *flags, "999"]) == 2
    message = capsys.readouterr().err
    assert "max_tokens = 999" in message and "is the folder of" not in message


def test_held_out_problems_of_a_file_that_are_trained_on_are_named() -> None:
    Path("train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": "1 + 2", "answer": "3"}\n')
    Path("test.jsonl").write_text('{"question": "1 + 2", "answer": "3"}\n{"question": "9 + 9", "answer": "18"}\n')
    files = {"data.source": "jsonl", "data.path": "train.jsonl", "eval.path": "test.jsonl"}
    configs = [load_config(None, HERE | files | {"eval.every": every}) for every in (2, 2, 0)]
    (told,) = preflight.find_shared_problems([*configs, load_config(None, HERE | {"eval.every": 1})])
    assert told.startswith("1 of 2 held-out problems are also in the training data")
