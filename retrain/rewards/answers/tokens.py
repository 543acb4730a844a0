"""Tokenization of an answer: numbers, names, words, signs."""

from __future__ import annotations

import re
from typing import NamedTuple

from retrain.rewards.answers.units import MULTIPLIERS, is_unit

_WORDS_OF_FUNCTIONS = """
    sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp sqrt abs
"""
FUNCTIONS = frozenset(_WORDS_OF_FUNCTIONS.split())
_NAMES = {"pi": "pi", "infinity": "infinity", "infty": "infinity", "inf": "infinity", "oo": "infinity"}
_SEPARATORS = frozenset({"and", "or"})

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<number>(?:\d+(?:\.\d*)?|\.\d+|\.(?=\\(?:overline|bar|dot)\s*\{))
       (?:\\(?:overline|bar|dot)\s*\{?\s*\d+\s*\}?|(?<=\.)\(\d+\))?
       (?:\\ldots)?(?:[eE][+-]?\d+(?![A-Za-z0-9.]))?)
  | (?P<text>\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|mathrm|operatorname|emph)\s*\*?\s*\{(?P<inside>[^{}]*)\})
  | (?P<environment>\\(?:begin|end)\s*\{[A-Za-z]*\*?\}(?:\{[|lrc ]*\})?)
  | (?P<command>\\[A-Za-z]+|\\.)
  | (?P<word>[A-Za-z]+)
  | (?P<sign>\*\*|<=|>=|!=|==|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_LETTERS = re.compile(r"\(?[A-Za-z]\)?(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+|\s+or\s+)\(?[A-Za-z]\)?)*")
_BARE_RATE = re.compile(r"(?<=\d) ?((?:km|cm|mm|mi|ft|m) ?/ ?(?:s|h|hr|sec|hour|min))(?=$|\^)")


class Unreadable(ValueError):
    """The notation of the answer is not supported."""


class Token(NamedTuple):
    """A token. `kind` is number, letter, word, function, command, environment, separator or sign."""

    kind: str
    text: str
    spaced: bool = False
    """Whether a space precedes it."""


def tokenize(text: str) -> list[Token]:
    """Split a normalized answer into tokens."""
    tokens: list[Token] = []
    spaced = False
    for found in _TOKEN.finditer(_BARE_RATE.sub(r"\\text{ \1}", text)):
        kind = found.lastgroup if found.lastgroup != "inside" else "text"
        piece = found[0]
        if kind == "space":
            spaced = True
            continue
        if kind == "text":
            tokens += _read_text(found["inside"], spaced, tokens)
        elif kind == "word":
            tokens += _read_word(piece, spaced, tokens)
        elif kind == "command" and piece[1:] in FUNCTIONS and piece != r"\sqrt":
            tokens.append(Token("function", piece[1:], spaced))
        else:
            tokens.append(Token(str(kind), piece, spaced))
        spaced = False
    return tokens


def _read_text(inside: str, spaced: bool, before: list[Token]) -> list[Token]:
    """The content of `\\text{…}`: words, or mathematics."""
    content = inside.strip()
    plain = content.strip(" .,:;").lower()
    if plain in _SEPARATORS:
        return [Token("separator", plain, True)]
    if plain in FUNCTIONS:
        return [Token("function", plain, spaced)]
    if not content:
        return []
    if len(content) == 1 and content.islower() and before and before[-1].kind == "number":
        return [Token("word", content, True)]
    starts_list = content.startswith(",") or plain.startswith(("and ", "or "))
    if re.search(r"\d", content) or _LETTERS.fullmatch(content) or starts_list:
        return tokenize(content)
    return [Token("word", inside, spaced or inside[:1] == " ")]


def _read_word(word: str, spaced: bool, before: list[Token]) -> list[Token]:
    """A run of letters: a function, a unit, another word, or adjacent variables."""
    if len(word) == 1:
        return [Token("letter", word, spaced)]
    if word in FUNCTIONS:
        return [Token("function", word, spaced)]
    lower = word.lower()
    if lower in _SEPARATORS:
        return [Token("separator", lower, spaced)]
    if lower in _NAMES and (lower != "inf" or not before):
        return [Token("command", "\\" + _NAMES[lower], spaced)]
    follows_value = bool(before) and (before[-1].kind in ("number", "word") or before[-1].text in (")", "}", "/"))
    if (follows_value and (is_unit(word) or lower in MULTIPLIERS)) or (follows_value and spaced) or len(word) > 3:
        return [Token("word", word, spaced)]
    return [Token("letter", letter, spaced and not at) for at, letter in enumerate(word)]
