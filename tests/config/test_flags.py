"""Flags: the documented spellings, `--section.key` for every option, and who wins over whom."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from retrain.config import TrainConfig, find_notes, load_config
from retrain.config.flags import click_options, load_with_flags, overrides_from
from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options, values_of
from retrain.config.toml import format_value
from retrain.errors import ConfigError

from .documented import FLAGS

COMMAND = click.Command("retrain", params=list(click_options()))


def overrides(*arguments: str) -> dict[str, Any]:
    return overrides_from(COMMAND.make_context("retrain", list(arguments)).params)


def load(*arguments: str, path: Path | None = None) -> TrainConfig:
    return load_config(path, overrides(*arguments))


@pytest.mark.parametrize(("flag", "text", "path", "value"), FLAGS, ids=[flag for flag, *_ in FLAGS])
def test_a_documented_flag_reaches_its_option(flag: str, text: str, path: str, value: object) -> None:
    assert overrides(flag, text) == {path: value}
    assert values_of(load(flag, text))[path] == value


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.path)
def test_every_option_is_set_by_its_short_flag_and_by_section_and_key(option: Option, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[{option.section}]\n" if option.section in OPTIONAL_SECTIONS else "")
    if option.type_name == "bool":
        word = "" if option.default else "no-"
        spellings = [[f"--{word}{flag[2:]}"] for flag in (option.flag, f"--{option.path}")]
    else:
        text = option.default if isinstance(option.default, str) else format_value(option.default)
        spellings = [[flag, text] for flag in (option.flag, f"--{option.path}")]
    for arguments in spellings:
        assert overrides(*arguments) == {option.path: _as_toml(option.default)}
        assert values_of(load(*arguments, path=file))[option.path] == option.default


def _as_toml(value: object) -> object:
    return [_as_toml(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("option", [o for o in all_options() if o.type_name == "bool"], ids=lambda option: option.path)
def test_a_boolean_is_turned_on_and_off(option: Option) -> None:
    for flag in (option.flag, f"--{option.path}"):
        assert overrides(flag) == {option.path: True}
        assert overrides(f"--no-{flag[2:]}") == {option.path: False}


def test_a_flag_that_was_not_given_overrides_nothing() -> None:
    assert overrides() == {}


def test_a_table_is_given_in_toml_or_as_json() -> None:
    expected = {"split": "train", "n": 3}
    flags = ["--provider", "verifiers", "--environment-id", "a/b"]
    assert load("--args", '{split="train", n=3}', *flags).environment.args == expected
    assert load("--args", '{"split": "train", "n": 3}', *flags).environment.args == expected


def test_lists_are_given_in_toml() -> None:
    assert load("--search-paths", '["a", "b"]').plugins.search_paths == ("a", "b")
    terms = load("--reward-terms", '[{type="match"}, {type="math", weight=0.5}]').reward.terms
    assert [(term.type, term.weight) for term in terms] == [("match", 1.0), ("math", 0.5)]


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nlr = 1e-3\nbatch_size = 2\n")
    config = load("--lr", "0.5", path=file)
    assert (config.training.lr, config.training.batch_size, config.training.group_size) == (0.5, 2, 16)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lr", "fast"], '[training] lr must be a number, got "fast".'),
        (["--batch-size", "3.9"], "[training] batch_size must be a whole number, got 3.9."),
        (["--seed", "1\nmax_steps = 2"], "[training] seed must be a whole number"),
        (["--lr", "nan"], "[training] lr must be a finite number"),
        (["--args", "[" * 5000], "[environment] args is nested too deeply"),
        (["--args", "{a=" * 40 + "1" + "}" * 40], "[environment] args is nested more than 32 levels"),
        (["--args", "{" + "a." * 60_000 + "a=1}"], "[environment] args is not valid JSON"),
        (["--schedule-args", "{ a = x }"], 'Texts inside need quotes: { key = "value" }'),
        (["--args", "{ split = train }"], 'Texts inside need quotes: { key = "value" }'),
        (["--search-paths", "a,b"], '[plugins] search_paths must be a list, got "a,b".'),
        (["--sepa-schedule", "cosine"], "[sepa] schedule must be one of 'linear', 'auto', got \"cosine\"."),
        (["--squeeze-adapter-path", "x"], "[squeeze] adapter_path was set, but the file has no such table."),
        (["--log-dir", "\udcff"], '[logging] log_dir must be valid Unicode text, got "\\udcff".'),
        (["--base-url", "\udcff"], "[model] base_url holds text that is not valid Unicode."),
    ],
)
def test_a_bad_value_of_a_flag_is_reported_like_one_of_the_file(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--pass-env", "OPENAI_API_KEY"], "Try: --pass-env '[\"OPENAI_API_KEY\"]'"),
        (["--pass-env", "MY_TOKEN, HOME"], 'Try: --pass-env \'["MY_TOKEN", "HOME"]\''),
        (["--search-paths", "my folder"], "Try: --search-paths '[\"my folder\"]'"),
        (["--schedule-args", "fast"], "Try: --schedule-args '{}'"),
        (["--overlap", "maybe"], 'Try: --overlap "auto"'),
        (["--lr", "fast"], "Try: --lr 4e-05"),
    ],
)
def test_what_to_try_instead_of_a_flag_is_a_flag_that_a_shell_accepts(arguments: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_with_flags(None, overrides(*arguments))
    assert hint in str(caught.value)
    assert load(*shlex.split(hint.removeprefix("Try: ")))


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--overlap", "auto, true or false"),
        ("--training.overlap", "auto, true or false"),
        ("--deterministic", "auto, true or false"),
        ("--model-dtype", "auto, fp32 or bf16"),
        ("--stop-when", '"" or decided'),
    ],
)
@pytest.mark.parametrize("following", [[], ["--log-dir", "logs/zz"]])
def test_a_flag_with_choices_does_not_take_the_next_flag_for_its_value(
    flag: str, values: str, following: list[str]
) -> None:
    with pytest.raises(click.UsageError, match=re.escape(f" needs a value: {values}")):
        load(flag, *following)
    assert overrides("--stop-when", "", "--overlap", "true") == {"campaign.stop_when": "", "training.overlap": True}


def test_an_override_of_an_unknown_option_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"unknown option \[training\] lrr.*Did you mean lr\?"):
        load_config(None, {"training.lrr": 1})


def test_completion_offers_choices_names_and_files() -> None:
    by_path = {param.name: param for param in COMMAND.params}
    context = click.Context(COMMAND)

    def complete(name: str, incomplete: str) -> list[tuple[str, str]]:
        return [(item.value, item.type) for item in by_path[name].shell_complete(context, incomplete)]

    assert complete("sepa__schedule", "l") == [("linear", "plain")]
    assert ("gtpo_sepa", "plain") in complete("algorithm__transform_mode", "gtpo")
    assert complete("backend__adapter_path", "lo") == [("lo", "file")]
    assert complete("training__lr", "") == []


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--max-steps", "2"], 2),
        (["--max-steps", "2", "--campaign-max-steps", "3"], 3),
        (["--training.max_steps", "4"], 4),
        (["--training.max-steps", "4"], 4),
    ],
)
def test_a_flag_for_the_steps_of_training_sets_those_of_a_campaign(
    flags: list[str], steps: int, tmp_path: Path
) -> None:
    file = tmp_path / "campaign.toml"
    file.write_text("[campaign]\nmax_steps = 20\n")
    config = load(*flags, path=file)
    assert config.campaign is not None
    assert config.campaign.max_steps == steps
    assert [note.where for note in find_notes(config)] == (["[training] max_steps"] if len(flags) > 2 else [])
    # The flag has set the campaign's.
    given = ["training.max_steps", "campaign.max_steps"][: 1 + (len(flags) > 2)]
    assert [note.where for note in find_notes(config, given)] == (["[training] max_steps"] if len(flags) > 2 else [])
