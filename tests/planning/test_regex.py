"""Planning tokens by phrase."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.schema import Planning
from retrain.errors import ConfigError, PluginError
from retrain.planning import PlanningDetector, build_detector
from retrain.planning.regex import DEFAULT_GRAMS, RegexDetector, parse_grams
from retrain.planning.spans import mark_spans


def marked(token_texts: list[str], grams: tuple[str, ...] = DEFAULT_GRAMS) -> list[str]:
    mask = RegexDetector(grams).detect(token_texts)
    assert len(mask) == len(token_texts)
    return [text for text, planned in zip(token_texts, mask, strict=True) if planned]


def test_there_are_eighteen_different_default_grams() -> None:
    assert len(DEFAULT_GRAMS) == len(set(DEFAULT_GRAMS)) == 18


@pytest.mark.parametrize("gram", DEFAULT_GRAMS)
def test_every_default_gram_is_found(gram: str) -> None:
    assert marked(["so ", gram.upper(), ", yes"]) == [gram.upper()]


@pytest.mark.parametrize(
    "token_texts",
    [
        ["Ġlet", "Ġme", "Ġche", "ck"],
        ["▁Let", "▁m", "e", "▁check"],
        ["let", " me", "Ċ", "check"],
        ["l", "et me ch", "eck"],
    ],
)
def test_a_gram_is_found_across_tokens_and_markers(token_texts: list[str]) -> None:
    assert marked(["Ġnow", "Ġ", *token_texts, ".", "Ġ7"]) == token_texts


@pytest.mark.parametrize(
    "token_texts", [["a", "wait"], ["wait", "ing"], ["verify", "ing"], ["un", "verify"], ["Ġwaiter"]]
)
def test_grams_match_whole_words_only(token_texts: list[str]) -> None:
    assert marked(token_texts) == []


@pytest.mark.parametrize("apostrophe", ["'", "’", "âĢĻ"])
def test_any_apostrophe_counts(apostrophe: str) -> None:
    assert marked(["That", apostrophe, "s", "Ġnot", "Ġright", "!"]) == ["That", apostrophe, "s", "Ġnot", "Ġright"]


def test_a_curly_apostrophe_in_a_gram_counts_too() -> None:
    assert marked(["it's", " odd"], ("it’s odd",)) == ["it's", " odd"]


def test_grams_that_overlap_are_all_found() -> None:
    assert marked(["hold", " on", " a", " minute", " now"], ("hold on", "on a minute")) == [
        "hold",
        " on",
        " a",
        " minute",
    ]
    assert marked(["wait", " a", " bit", " x"], ("wait", "wait a bit")) == ["wait", " a", " bit"]


def test_a_hyphen_or_a_line_break_may_stand_between_words() -> None:
    assert marked(["double", "-", "check"]) == ["double", "-", "check"]
    assert marked(["double", "Ċ", "check"]) == ["double", "Ċ", "check"]


def test_letters_that_grow_when_lowered_shift_nothing() -> None:
    assert marked(["İİİİ", " ", "WAIT", " x"]) == ["WAIT"]


def test_signs_in_grams_are_taken_literally() -> None:
    assert marked(["what", "?!", " (a+b)"], ("?!", "(a+b)")) == ["?!", " (a+b)"]


def test_nothing_in_nothing_out() -> None:
    assert marked([]) == []
    assert marked(["", ""]) == []


@given(st.lists(st.text(alphabet="wait ▁Ġx", max_size=4), max_size=12))
def test_tokenisation_does_not_change_which_characters_are_found(token_texts: list[str]) -> None:
    whole = list("".join(token_texts))
    by_character = RegexDetector().detect(whole)
    expected, at = [], 0
    for text in token_texts:
        expected.append(bool(by_character[at : at + len(text)].any()))
        at += len(text)
    found = RegexDetector().detect(token_texts)
    assert [bool(flag) for flag, text in zip(found, token_texts, strict=True) if text] == [
        flag for flag, text in zip(expected, token_texts, strict=True) if text
    ]


def test_spans_mark_every_token_they_touch() -> None:
    assert mark_spans(["ab", "cd", "ef"], [(1, 3)]).tolist() == [True, True, False]
    assert mark_spans(["ab", "cd", "ef"], [(2, 4), (5, 6)]).tolist() == [False, True, True]
    assert mark_spans(["ab", "cd"], []).tolist() == [False, False]


@pytest.mark.parametrize("text", ['["wait", "hold  on"]', "wait, hold on", ' "wait" ,"hold on"', "wait,\nhold on"])
def test_grams_come_as_json_or_comma_separated(text: str) -> None:
    assert parse_grams(text) == ("wait", "hold on")


@pytest.mark.parametrize("text", ['["wait"', '{"a": 1}', "[1, 2]", "[]", "wait,,hold on", '["wait", " "]', ","])
def test_malformed_grams_are_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="strategic_grams"):
        RegexDetector.from_config(Planning(), text)


def test_empty_grams_in_the_configuration_take_the_defaults() -> None:
    assert RegexDetector.from_config(Planning(), "").grams == DEFAULT_GRAMS
    assert RegexDetector.from_config(Planning(), "eureka").grams == ("eureka",)


def test_the_configured_detector_is_built() -> None:
    detector = build_detector(Planning(), "eureka")
    assert isinstance(detector, PlanningDetector)
    assert detector.detect(["Eureka", "!"]).tolist() == [True, False]


def test_a_detector_of_the_wrong_shape_is_named() -> None:
    with pytest.raises(PluginError, match=r"'json\.dumps' has no from_config"):
        build_detector(Planning(detector="json.dumps"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", r"raised KeyError\('x'\) in detect"),
        ("raise SystemExit(2)", r"raised SystemExit\(2\) in detect"),
        ("return [True]", r"returned a mask of shape \(1,\) for 2 tokens"),
        ("return None", r"returned a mask of shape \(\) for 2 tokens"),
        ("return [[True], [True, False]]", "raised ValueError"),
    ],
)
def test_a_detector_that_misbehaves_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.delitem(sys.modules, "odd_detector", raising=False)
    (tmp_path / "odd_detector.py").write_text(
        "class Odd:\n"
        "    @classmethod\n"
        "    def from_config(cls, planning, strategic_grams): return cls()\n"
        f"    def detect(self, token_texts): {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    detector = build_detector(Planning(detector="odd_detector.Odd"))
    with pytest.raises(PluginError, match=message) as caught:
        detector.detect(["a", "b"])
    assert "planning plugin 'odd_detector.Odd'" in str(caught.value)
    assert (caught.value.__cause__ is not None) == ("raised" in str(caught.value))


def test_a_detector_may_answer_with_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list_detector.py").write_text(
        "class Odd:\n"
        "    @classmethod\n"
        "    def from_config(cls, planning, strategic_grams): return cls()\n"
        "    def detect(self, token_texts): return [text == 'b' for text in token_texts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mask = build_detector(Planning(detector="list_detector.Odd")).detect(["a", "b"])
    assert (mask.dtype, mask.tolist()) == (bool, [False, True])


def test_a_large_batch_takes_well_under_a_second() -> None:
    words = [
        "the",
        "let",
        "me",
        "value",
        "that",
        "this",
        "right",
        "try",
        "wait",
        "check",
        "go",
        "back",
        "and",
        "12",
        "on",
    ]
    draw = random.Random(0)
    completions = [[f"Ġ{draw.choice(words)}" for _ in range(2000)] for _ in range(128)]
    detector = RegexDetector()
    start = time.process_time()
    found = sum(int(detector.detect(token_texts).sum()) for token_texts in completions)
    assert time.process_time() - start < 2.0
    assert found > 0
