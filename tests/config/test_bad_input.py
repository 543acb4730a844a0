"""Thousands of mutated files: a valid configuration or one ConfigError that names the place, never anything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from retrain.cli import run
from retrain.config import TrainConfig, build_config, dump_config
from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options
from retrain.config.toml import format_value, parse_toml
from retrain.errors import ConfigError
from tests.fuzz import examples

from .documented import ANNOTATED

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
PLACE = re.compile(r"\[[^\]]*\]|line \d+|outside any table")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
LINES = ANNOTATED.strip().splitlines()

odd_text = st.text(max_size=20).map(format_value)
odd_values = st.one_of(
    st.sampled_from(
        """
        true false nan -nan inf -inf 0 -0 -1 1.5 1e400 -1e400 1e-400 0x7f 0b1 0o17 99999999999999999999 [] {} [[]] [{}]
        [1,"a"] [nan] "" "auto" "null" "{" "[" '{"a":null}' "[1]" "cpu" "gpu:-1" "a.b" "a:b" "..": 
        1979-05-27 07:32:00 1979-05-27T07:32:00Z {a={b={c=1}}} {a.b.c=1} [{a=1},{a=1}] {""=1} "\\u0000" "\\U0001F600"
        '''' 0.1.2 1__0 ' " = ]
        """.split()  # noqa: SIM905  (one value a word reads better than sixty quoted ones)
    ),
    st.integers().map(str),
    st.floats().map(str),
    odd_text,
    st.integers(1, 120).map(lambda depth: "[" * depth + "]" * depth),
    st.integers(1, 120).map(lambda depth: "{a=" * depth + "1" + "}" * depth),
    st.integers(1, 20).map(lambda size: "0x" + "f" * 3**size if size < 9 else "9" * 500 * size),
    st.lists(odd_text, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
)
options = st.sampled_from(all_options())


@st.composite
def typos(draw: st.DrawFn, word: str) -> str:
    """The word with one character dropped, doubled, swapped in or put in capitals."""
    at = draw(st.integers(0, len(word) - 1))
    middle = draw(st.sampled_from(["", word[at] * 2, draw(st.characters()), word[at].upper(), f"-{word[at]}"]))
    return word[:at] + middle + word[at + 1 :]


def outcome(text: str) -> ConfigError | TrainConfig:
    """What loading the text comes to; any other exception fails the test."""
    try:
        return build_config(parse_toml(text, "fuzz.toml"), {}, "fuzz.toml")
    except ConfigError as error:
        message = str(error)
        assert message.startswith("fuzz.toml ")
        assert all(PLACE.search(f"{p.where} {p.text}") for p in error.issues) if error.issues else PLACE.search(message)
        assert not UNPRINTABLE.search(message) and len(message) < 100_000
        message.encode("utf-8")
        return error


@given(options, odd_values)
@example(all_options()[0], "\ud800")
@settings(FUZZ, max_examples=examples(900))
def test_a_wrong_value_names_its_key(option: Option, value: str) -> None:
    found = outcome(f"[{option.section}]\n{option.key} = {value}\n")
    if isinstance(found, ConfigError):
        assert option.key in str(found) or "line " in str(found)
    else:
        assert outcome(dump_config(found)) == found or "nan" in value


@given(options.flatmap(lambda option: st.tuples(st.just(option), typos(option.key), typos(option.section))))
@settings(FUZZ, max_examples=examples(500))
def test_a_misspelt_key_or_table_is_reported(drawn: tuple[Option, str, str]) -> None:
    option, key, section = drawn
    default = format_value(option.default)
    for text, word in (
        (f"[{option.section}]\n{format_value(key)} = {default}", key),
        (f"[{format_value(section)}]\n{option.key} = {default}", section),
    ):
        found = outcome(text)
        if isinstance(found, ConfigError):
            message = str(found)
            assert word in message or format_value(word)[1:-1] in message or "line " in message
        else:
            assert word in (option.key, option.section) or any(word in (o.key, o.section) for o in all_options())


@st.composite
def mutated_files(draw: st.DrawFn) -> str:
    """The annotated file with a few lines changed in the ways that people and editors change them."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        option = draw(options)
        value = draw(odd_values)
        lines[at : at + 1] = draw(
            st.sampled_from(
                [
                    [],
                    [lines[at], lines[at]],
                    [f"[{lines[at]}]"],
                    [lines[at].replace("=", " ")],
                    [lines[at][: len(lines[at]) // 2]],
                    [lines[at] + draw(st.text(max_size=5))],
                    [lines[at].partition("=")[0] + "= " + value],
                    [f"{option.section}.{option.key} = {value}"],
                    [f"[{option.section}.{option.key}]", f"x = {value}"],
                    [f"[[{option.section}]]", f"{option.key} = {value}"],
                    [f"[{option.section}]"],
                    [f"[[{option.section}.{option.key}]]"],
                    [f"[{'.'.join(['a'] * draw(st.integers(1, 300)))}]"],
                    [f'["{draw(st.text(max_size=3))}"]', f"{draw(st.text(max_size=3))} = {value}"],
                ]
            )
        )
    return "\n".join(lines)


@given(mutated_files())
@settings(FUZZ, max_examples=examples(800))
def test_a_mutated_file_is_valid_or_rejected_with_a_location(text: str) -> None:
    outcome(text)


@given(st.text(st.sampled_from("[]{}=.,\"'\\\n #ab_-+:0123456789eTZxtrufalsin\t\r\x00é"), max_size=60))
@settings(FUZZ, max_examples=examples(300))
def test_any_text_is_valid_or_rejected_with_a_location(text: str) -> None:
    outcome(text)


COMMON_MISTAKES = [
    "lr = 1e-4",
    "[training]\nlr = '1e-4'",
    "[training]\nlr = 1e-4.0",
    "[training]\nlr 1e-4",
    "[training\nlr = 1",
    "[training]\nLR = 1e-4",
    "[training]\nlearning_rate = 1e-4",
    "[training]\nbatch-size = 4",
    "[training]\nbatch_size = 0",
    "[training]\nbatch_size = None",
    "[training]\nlr = nan",
    "[training]\nseed = 99999999999999999999999",
    "[trainer]\nmax_steps = 3",
    "[[model]]\nlora_rank = 4",
    "model = 'a/b'",
    "[model]\nmodel = ['a/b']",
    "[reward]\ntype = 'regex'",
    "[environment]\nprovider = 'gym'",
    "[environment]\nargs = '{'",
    "[backend]\ndevices = 'cuda:0'",
    "[sepa]\nschedule = 'cosine'",
    "[campaign]\nseeds = 42",
    "[campaign]\nconditions = []",
    "[campaign]\nconditions = [{advantage = 'grpo'}]",
    "[logging]\nwandb_tags = ['a']",
    "[inference]\nprefix_caching = 1",
    "[inference]\nengine = 'pytorch'\nengine = 'vllm'",
    "[environment]\nargs = " + "[" * 2000 + "]" * 2000,
    "[training]\n" + "a." * 50 + "a = 1",
    "\x00",
    "{}",
    '{"training": {"lr": 1}}',
    "training:\n  lr: 1",
    "<xml/>",
]


@pytest.mark.parametrize("text", COMMON_MISTAKES, ids=lambda text: repr(text[:40]))
def test_the_command_line_exits_with_2_and_no_traceback(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text, encoding="utf-8")
    assert run(["run.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: run.toml ")
    assert "Traceback" not in captured.err and PLACE.search(captured.err)


def test_options_of_absent_tables_can_be_mutated_too() -> None:
    assert {option.section for option in all_options()} > set(OPTIONAL_SECTIONS)
