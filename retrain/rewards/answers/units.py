"""Units of measurement: names and conversions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as a factor and the powers of its base units; an unknown word is a base unit."""

    factor: Fraction = Fraction(1)
    powers: tuple[tuple[str, int], ...] = ()


PERCENT = Unit(powers=(("percent", 1),))
DEGREE = Unit(powers=(("degree", 1),))

# Words of one unit, its base, and its size in that base.
_TABLE: tuple[tuple[str, str, Fraction], ...] = (
    ("m meter metre", "metre", Fraction(1)),
    ("km kilometer kilometre", "metre", Fraction(1000)),
    ("dm decimeter decimetre", "metre", Fraction(1, 10)),
    ("cm centimeter centimetre", "metre", Fraction(1, 100)),
    ("mm millimeter millimetre", "metre", Fraction(1, 1000)),
    ("in inch inches", "metre", Fraction(254, 10000)),
    ("ft foot feet", "metre", Fraction(3048, 10000)),
    ("yd yard", "metre", Fraction(9144, 10000)),
    ("mi mile", "metre", Fraction(1609344, 1000)),
    ("g gram gramme", "gram", Fraction(1)),
    ("kg kilogram kilo", "gram", Fraction(1000)),
    ("mg milligram", "gram", Fraction(1, 1000)),
    ("lb lbs pound", "gram", Fraction(45359237, 100000)),
    ("oz ounce", "gram", Fraction(45359237, 1600000)),
    ("s sec second", "second", Fraction(1)),
    ("min mins minute", "second", Fraction(60)),
    ("h hr hrs hour", "second", Fraction(3600)),
    ("day", "second", Fraction(86400)),
    ("week wk", "second", Fraction(604800)),
    ("l liter litre", "litre", Fraction(1)),
    ("ml milliliter millilitre", "litre", Fraction(1, 1000)),
    ("dollar usd buck", "dollar", Fraction(1)),
    ("cent", "dollar", Fraction(1, 100)),
    ("euro eur €", "euro", Fraction(1)),
    ("gbp £", "gbp", Fraction(1)),
    ("yen jpy ¥", "yen", Fraction(1)),
    ("degree deg °", "degree", Fraction(1)),
    ("radian rad", "radian", Fraction(1)),
    ("percent percentage pct", "percent", Fraction(1)),
    ("celsius", "celsius", Fraction(1)),
    ("fahrenheit", "fahrenheit", Fraction(1)),
    ("year yr", "year", Fraction(1)),
    ("month", "month", Fraction(1)),
    ("person people", "person", Fraction(1)),
    ("child children", "child", Fraction(1)),
    ("man men", "man", Fraction(1)),
    ("woman women", "woman", Fraction(1)),
)
_KNOWN = {word: (base, size) for words, base, size in _TABLE for word in words.split()}
_SPEEDS = {"mph": "mile / hour", "kph": "km / hour", "kmh": "km / hour", "mps": "metre / second"}
# Words that are not units.
_WORDS_OF_EMPTY = """
    unit the of a an total exactly different distinct possible
"""
_EMPTY = frozenset(_WORDS_OF_EMPTY.split())
# Words that change the meaning of a number next to them.
_WORDS_OF_MEANINGFUL = """
    or and not no to from between less more than least most over under above below about approximately around
    nearly mod modulo base factorial squared cubed half halve third quarter fourth fifth sixth seventh eighth ninth
    tenth hundredth thousandth sqrt times plus minus divided by if
    when for where with except but only infinity infinite undefined false true none nor is are root twice thrice
    double triple remainder per-cent negative positive
"""
MEANINGFUL = frozenset(_WORDS_OF_MEANINGFUL.split())
MULTIPLIERS = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen"}
"""Units by their signs, which may precede a number."""
_PIECE = re.compile(r"([A-Za-z€£¥°]+)\.?\s*(?:\^?\s*\{?\s*(-?\d)\s*\}?)?|(/|\bper\b)|[\s.,*()-]+|\\cdot")
_LONGEST = 60
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


@lru_cache(maxsize=4096)
def is_unit(word: str) -> bool:
    """Whether a word is a known unit, singular or plural."""
    return _singular(word) in _KNOWN or word.lower() in _SPEEDS


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    """Read `cm`, `square feet`, `m/s` or `apples`; None if the words may mean something else."""
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    for word, meaning in _SPEEDS.items():
        text = re.sub(rf"\b{word}\b", meaning, text, flags=re.IGNORECASE)
    factor, powers = Fraction(1), dict[str, int]()
    at, sign, power = 0, 1, 1
    for piece in _PIECE.finditer(text):
        if piece.start() != at:
            return None
        at = piece.end()
        if piece[3] or (piece[1] or "").lower() == "per":
            sign = -1
        elif piece[1] and piece[1].lower() in _POWERS:
            power = _POWERS[piece[1].lower()]
        elif piece[1]:
            word = piece[1].lower()
            if {word, _singular(word)} & MEANINGFUL or word in MULTIPLIERS:
                return None
            if word in _EMPTY or _singular(word) in _EMPTY:
                power = 1
                continue
            base, size = _KNOWN.get(piece[1], _KNOWN.get(_singular(word), (_singular(word), Fraction(1))))
            raised = sign * power * int(piece[2] or 1)
            factor *= size**raised
            powers[base] = powers.get(base, 0) + raised
            power = 1
    if at != len(text):
        return None
    return Unit(factor, tuple(sorted((base, power) for base, power in powers.items() if power)))


def _singular(word: str) -> str:
    word = word.lower()
    if word in _KNOWN:
        return word
    for ending, replacement in (("ies", "y"), ("ches", "ch"), ("xes", "x"), ("sses", "ss"), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 1 and not word.endswith("ss"):
            return word[: -len(ending)] + replacement
    return word
