"""Planning tokens by phrase: every token that overlaps a strategic gram.

Fast and predictable, but blind to other phrases and languages.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retrain.errors import ConfigError
from retrain.planning.spans import Span, join_tokens, mark_spans
from retrain.types import BoolArray

if TYPE_CHECKING:
    from retrain.config.schema import Planning

HESITATION = ("wait", "hold on", "let me think", "on second thought")
CHECKING = ("let me check", "verify", "double check", "is this right", "sanity check")
REDIRECTION = ("try another approach", "try a different", "go back and", "start over")
CONTRADICTION = ("that's not right", "that doesn't work", "this contradicts")
INSIGHT = ("the key is", "notice that")
DEFAULT_GRAMS = HESITATION + CHECKING + REDIRECTION + CONTRADICTION + INSIGHT

# Byte-level vocabularies spell the curly apostrophe as three characters, matched in lower case like all the text.
_APOSTROPHE = f"(?:['’ʼ]|{'âĢĻ'.lower()})"


class RegexDetector:
    """Marks the tokens of strategic grams: whole words, any case, across token boundaries."""

    def __init__(self, grams: Sequence[str] = DEFAULT_GRAMS) -> None:
        self.grams = tuple(grams)
        self._pattern = _compile(self.grams)

    @classmethod
    def from_config(cls, planning: Planning, strategic_grams: str) -> RegexDetector:
        """The detector for `[logging] strategic_grams`, a JSON array or comma-separated; empty takes the defaults."""
        return cls(parse_grams(strategic_grams) if strategic_grams.strip() else DEFAULT_GRAMS)

    def detect(self, token_texts: Sequence[str]) -> BoolArray:
        """True on every token that a gram overlaps."""
        return mark_spans(token_texts, self._find(_lower(join_tokens(token_texts))))

    def _find(self, text: str) -> Iterator[Span]:
        # A lookahead consumes nothing, so that overlapping grams are all found.
        return (match.span(1) for match in self._pattern.finditer(text))


def parse_grams(text: str) -> tuple[str, ...]:
    """The grams in a JSON array (`["wait", "hold on"]`) or a comma-separated list (`wait, hold on`)."""
    stripped = text.strip()
    if stripped.startswith(("[", "{")):
        try:
            values = json.loads(stripped)
        except json.JSONDecodeError as error:
            raise _bad_grams(text, f"is not a JSON array: {error}") from error
    else:
        values = next(csv.reader([stripped.replace("\n", " ")], skipinitialspace=True), [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _bad_grams(text, "is not a JSON array of strings")
    grams = tuple(" ".join(value.split()) for value in values)
    if not grams or not all(grams):
        raise _bad_grams(text, "has an empty gram")
    return grams


def _bad_grams(text: str, why: str) -> ConfigError:
    return ConfigError(f'[logging] strategic_grams {why}, got {text!r}.  Try: strategic_grams = "wait, let me check"')


def _compile(grams: Sequence[str]) -> re.Pattern[str]:
    # Longest first: of two grams with the same start the longer one covers both.
    ordered = sorted({_lower(" ".join(gram.split())) for gram in grams}, key=lambda gram: (-len(gram), gram))
    if not ordered or not all(ordered):
        raise ValueError("a regex detector needs at least one gram, and none may be empty")
    alternatives = "|".join(_gram_pattern(gram) for gram in ordered)
    return re.compile(f"(?=({alternatives}))")


def _gram_pattern(gram: str) -> str:
    words = [re.sub("['’ʼ]", _APOSTROPHE, re.escape(word)) for word in gram.split(" ")]
    before = r"\b" if gram[0].isalnum() else ""
    after = r"\b" if gram[-1].isalnum() else ""
    return before + r"[\s\-]+".join(words) + after


def _lower(text: str) -> str:
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    # A few letters (İ) become longer in lower case, which would shift all positions after them.
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)
