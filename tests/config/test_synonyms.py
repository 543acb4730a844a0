"""Options by the names they have elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.config import build_config
from retrain.config.flags import load_with_flags
from retrain.config.options import OPTIONAL_SECTIONS, all_options
from retrain.config.synonyms import synonyms
from retrain.errors import ConfigError


def test_a_synonym_is_of_one_option_and_no_flag_of_a_training_run() -> None:
    assert sum(len(option.facets.synonyms or ()) for option in all_options()) == len(synonyms()) > 50
    flags = {option.flag for option in all_options() if option.section not in OPTIONAL_SECTIONS}
    assert not {f"--{name.replace('_', '-')}" for name in synonyms()} & flags


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--learning-rte", "--lr"),
        ("-lr", "--lr"),
        ("--bs", "--batch-size"),
        ("--wd", "--weight-decay"),
        ("--temp", "--temperature"),
        ("--training.learning-rate", "--lr"),
        ("--num-generations", "--group-size"),
        ("--output-dir", "--log-dir"),
        ("--max-new-tokens", "--max-tokens"),
        ("--gradient-accumulation-steps", "--micro-batches"),
        ("--ratio-cap", "--loss-ratio-cap"),
        ("--terms", "--reward-terms"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_ours(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([typed, "1"]) == 2
    assert f"No such option '{typed}'. Did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({"learning_rate": 1e-4}, "Did you mean lr?"),
        ({"steps": 10}, "Did you mean max_steps?"),
        ({"max_grad_norm": 1.0}, "Did you mean [loss] grad_clip?"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours(table: dict[str, float], hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config({"training": table}, {}, "run.toml")
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        ("backend", "device", "Did you mean devices?"),
        ("training", "device", "Did you mean [backend] devices?"),
        ("model", "name", "Did you mean model?"),
        ("logging", "name", "`retrain help` lists every option."),
    ],
)
def test_a_key_in_the_wrong_table_or_without_its_s_is_answered_with_ours(table: str, key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config({table: {key: "x"}}, {}, "run.toml")
    assert str(raised.value).endswith(f"unknown option [{table}] {key}.  {hint}")


def test_the_device_flag_of_squeeze_is_answered_with_devices_in_other_files() -> None:
    with pytest.raises(ConfigError) as raised:
        load_with_flags(None, {"squeeze.device": "cpu"})
    assert str(raised.value).endswith("the file has no such table.  Did you mean [backend] devices (--devices)?")


@pytest.mark.parametrize("rest", [[], ["small.toml"], ["--max-steps", "1"]])
def test_a_misspelt_train_is_answered_with_what_help_lists(capsys: pytest.CaptureFixture[str], rest: list[str]) -> None:
    assert run(["trian", *rest]) == 2
    assert capsys.readouterr().err == (
        "error: there is no file or command 'trian'.  Did you mean train? It needs no command.  "
        "Try: retrain my_run.toml\n"
    )


def test_what_is_suggested_for_the_path_of_a_flag_is_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").touch()
    (tmp_path / "run.toml").write_text('[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 9\n')
    assert run(["run.toml", "--data-source", "jsonl", "--data-path", "q.jsonl"]) == 2
    printed = capsys.readouterr().err
    assert '--data-path ([data] path) = "q.jsonl": there is no file' in printed
    assert 'Try: --data-path "p.jsonl"' in printed


@pytest.mark.parametrize(
    ("table", "key", "meant"),
    [("model", "lora_alpha", "[lora] alpha"), ("training", "gtpo_beta", "[gtpo] beta"), ("loss", "loss_type", "type")],
)
def test_the_flag_of_an_option_is_understood_as_a_key(table: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown option [{table}] {key}.  Did you mean {meant}?")):
        build_config({table: {key: 1}}, {}, "a.toml")


@pytest.mark.parametrize(
    ("table", "key", "meant"),
    [
        ("loss", "clip_grad", "grad_clip"),
        ("training", "clip_grad", "[loss] grad_clip"),
        ("training", "gradient_clipping", "[loss] grad_clip"),
        ("eval", "steps", "every"),
        ("eval", "num_samples", "samples"),
        ("logging", "steps", "every"),
        ("kl", "weight", "beta"),
        ("optimizer", "min_lr", "schedule_args"),
        ("training", "min_lr", "[optimizer] schedule_args"),
        ("training", "num_warmup_steps", "[optimizer] warmup_steps"),
        ("data", "test_path", "[eval] path"),
        ("data", "train_files", "path"),
        ("model", "pretrain", "model"),
        ("training", "eps_clip", "[loss] clip_high"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_the_option_meant(table: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown option [{table}] {key}.  Did you mean {meant}?")):
        build_config({table: {key: 1}}, {}, "a.toml")


@pytest.mark.parametrize(("table", "key"), [("reward", "weight"), ("logging", "ckpt_path"), ("logging", "save_path")])
def test_a_key_that_is_only_a_little_like_one_of_another_table_has_no_suggestion(table: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({table: {key: 1}}, {}, "a.toml")
    assert "Did you mean" not in str(caught.value)
