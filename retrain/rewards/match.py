r"""The `match` reward: compares the last `\boxed{…}` of the response with the reference as normalized text.

It normalizes notation, not values: `\dfrac12` equals `\frac{1}{2}`, but not `0.5`. Use `math` for that.
"""

from __future__ import annotations

import re
from functools import lru_cache

from retrain.rewards.answers.notation import tidy
from retrain.rewards.answers.units import CURRENCIES, DEGREE, PERCENT, Unit, is_unit, read_unit

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)\s+([0-9A-Za-z])|\\.|[{}]", re.DOTALL)
_GSM8K = re.compile(r"####[ \t]*([^\n]*\S)[ \t]*$")
_THOUGHT_END = "</think>"
_THOUGHT_START = "<think>"

_ATOM = r"(?:\{([^{}]*)\}|([0-9A-Za-z]|\\[A-Za-z]+))"
_BARE_FRACTION = re.compile(rf"\\frac{_ATOM}{_ATOM}")
_SLASH_FRACTION = re.compile(r"(-?)(\d+)/(\d+)")
_BARE_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|mathrm|operatorname|emph)\s*\{([^{}]*)\}")
# A unit is text after a value at the end of the answer, possibly with a power: `5\text{ cm}^2`.
_TEXT_UNIT = re.compile(
    r"(?<=[0-9})a-z ])\\(?:text(?:rm|normal|it)?|mbox|mathrm)\s*\{\s*(?![apAP]\.?\s?[mM]\b)([A-Za-z][^{}]*)\}"
    r"\s*(?:\^\s*\{?(\d)\}?)?$"
)
_BARE_UNIT = re.compile(r"(?<=[0-9}])\s+((?![ap]\.?m\b)[A-Za-z][A-Za-z ./]*)(?:\^\{?(\d)\}?)?$", re.IGNORECASE)
_DEGREE = re.compile(r"\^\\circ(?![A-Za-z]) ?")
_PERCENT = re.compile(r"\\?%")
_CURRENCIES = [(re.compile(re.escape(sign)), read_unit(word)) for sign, word in CURRENCIES.items()]
_ASSIGNMENT = re.compile(r"^([A-Za-z])\s*(?:=|\\in(?![A-Za-z]))(?=[^=]+$)")
_DECIMAL = re.compile(r"([+-]?)(\d*)\.(\d*)")
_BRACED_SCRIPT = re.compile(r"([_^])\{([0-9A-Za-z])\}")
_CLOCK = re.compile(r"0?(\d{1,2}(?::\d\d)+)(?:([ap])\.?m\.?)?", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"\((-?[\d.]+|[A-Za-z])\)")
# `(D) 12` and `D. 12` are a choice and its text.
_CHOICE = re.compile(r"(?=\(?[A-J][).:]\s*\S)\(?([A-J])[).:]\s*(?![,)])")
# Text that negates a choice or names another one.
_OTHER_CHOICE = re.compile(r"\([A-J]\)|^[A-J]\b|\b[A-J][).:]|\b(?:or|and|not|wrong|false|incorrect)\b|[+&]")
_BASE_WORDS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASE = re.compile(r"_\{?(" + "|".join(_BASE_WORDS) + r")\}?$")


def last_boxed(text: str) -> str:
    r"""The content of the last complete `\boxed{…}`, or "" if there is none.

    Runs in linear time, even for completions that repeat `\boxed{` thousands of times.
    """
    start = text.find("\\boxed")
    fbox = text.find("\\fbox")
    if start < 0 or 0 <= fbox < start:
        start = fbox
    if start < 0:
        return ""
    opened_at: list[int] = []  # start of the content of each open group; -1 for groups other than boxes
    last_start, last_content = -1, ""
    for token in _BOX_TOKEN.finditer(text, start):
        mark = token.group()
        if mark == "{":
            opened_at.append(-1)
        elif mark == "}":
            begin = opened_at.pop() if opened_at else -1
            if begin > last_start:
                last_start, last_content = begin, text[begin : token.start()]
        elif mark.endswith("{") and len(mark) > 2:
            opened_at.append(token.end())
        elif token.group(1) is not None:
            last_start, last_content = token.start(1), token.group(1)
    return last_content.strip()


def final_answer(response: str, think_boxes: bool = True) -> str:
    r"""The last box of a response; without `think_boxes`, only after `</think>`."""
    if not think_boxes:
        _, ended, after = response.rpartition(_THOUGHT_END)
        response = after if ended or _THOUGHT_START not in response else ""
    return last_boxed(response)


def answer_of(reference: str) -> str:
    r"""The answer in a reference: its last box, the text after GSM8K's `####`, or all of it."""
    boxed = last_boxed(reference)
    if boxed or "####" not in reference:
        return boxed or reference.strip()
    found = _GSM8K.search(reference.rstrip())
    return found[1].strip() if found else reference.strip()


@lru_cache(maxsize=8192)  # a group shares its reference and most answers
def normalize(answer: str) -> str:
    """Normalize an answer so that equivalent notations become the same text."""
    return split_answer(answer)[0]


@lru_cache(maxsize=8192)
def split_answer(answer: str) -> tuple[str, Unit | None, str]:
    """The normalized text of an answer, its unit, and the variable it is assigned to."""
    text, unit = _cut_unit(tidy(answer))
    text = _TEXT.sub(r"\1", text)
    for pattern, meaning in ((_DEGREE, DEGREE), (_PERCENT, PERCENT), *_CURRENCIES):
        shorter = pattern.sub("", text)
        unit = unit or (meaning if shorter != text else None)
        text = shorter
    text = _close_up(text).rstrip(".,")
    assigned = _ASSIGNMENT.match(text)
    text = _BRACED_SCRIPT.sub(r"\1\2", text[assigned.end() :] if assigned else text)
    while len(text) > 2 and text[0] == "{" and text[-1] == "}" and text.count("{") == 1:
        text = text[1:-1]
    text = _normalize_number(_normalize_fractions(text))
    # A single letter is a variable or a choice, where case matters.
    text = text.lower() if len(text) > 1 and text.isalpha() else text
    return text, unit, assigned[1] if assigned else ""


def _close_up(text: str) -> str:
    """Remove whitespace, except one space between digits: `1 1/2` is not eleven halves."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\s+", " ", text))


def _cut_unit(text: str) -> tuple[str, Unit | None]:
    found = _TEXT_UNIT.search(text)
    if found is None:
        found = _BARE_UNIT.search(text)
        if found is not None and not all(is_unit(word) or len(word) > 2 for word in re.split(r"[ ./]+", found[1])):
            found = None
    unit = read_unit(found[1] + (f"^{found[2]}" if found[2] else "")) if found else None
    if found is None or unit is None:
        return text, None
    return text[: found.start()].strip(), unit if unit.powers else None


def _normalize_fractions(text: str) -> str:
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _BARE_FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[2]}}}{{{found[3] or found[4]}}}", text)
    whole = _SLASH_FRACTION.fullmatch(text)
    if whole:
        return f"{whole[1]}\\frac{{{whole[2]}}}{{{whole[3]}}}"
    # A minus in the numerator moves before the fraction if that is the whole answer.
    return re.sub(r"^\\frac\{-([^{}+-]*)\}(\{[^{}]*\})$", r"-\\frac{\1}\2", text)


def _normalize_number(text: str) -> str:
    bracketed = _IN_BRACKETS.fullmatch(text)
    text = bracketed[1] if bracketed else text
    decimal = _DECIMAL.fullmatch(text)
    if decimal and (decimal[2] or decimal[3]):
        fraction = decimal[3].rstrip("0")
        text = f"{decimal[1]}{decimal[2] or '0'}" + (f".{fraction}" if fraction else "")
    if re.fullmatch(r"\+[\d.]+", text):
        text = text[1:]
    if re.fullmatch(r"-?0\d+(?:\.\d+)?", text):
        text = re.sub(r"^(-?)0+(?=\d)", r"\1", text)
    clock = _CLOCK.fullmatch(text)
    if clock:
        text = clock[1] + (f"{clock[2].lower()}m" if clock[2] else "")
    text = re.sub(r"^\(([0-9A-Za-z]+)\)_", r"\1_", text)
    return _BASE.sub(lambda found: f"_{_BASE_WORDS[found[1]]}", text)


def equal_as_text(answer: str, gold: str) -> bool:
    """Whether two answers are equal after normalization; an empty answer equals nothing.

    A unit, or a variable with `=`, may be missing on one side; where both have one they must agree.
    """
    (text, unit, variable), (gold_text, gold_unit, gold_variable) = split_answer(answer), split_answer(gold)
    for letter, full in ((gold_text, answer), (text, gold)):
        if len(letter) == 1 and letter.isupper() and (choice := _CHOICE.match(_TEXT.sub(r"\1", tidy(full)))):
            return choice[1] == letter and not _OTHER_CHOICE.search(choice.string[choice.end() :])
    if text and _close_up(tidy(answer)) == _close_up(tidy(gold)):  # `5 m` and `5m`, unit or variable
        return True
    if text == "" or text != gold_text:
        return False
    same_unit = unit is None or gold_unit is None or unit == gold_unit
    return same_unit and (not variable or not gold_variable or variable == gold_variable)


class MatchReward:
    r"""1.0 if the last box of the response matches the reference, else 0.0."""

    def __init__(self, think_boxes: bool = True) -> None:
        self._think_boxes = think_boxes

    def score(self, response: str, reference: str) -> float:
        """Compare the response's last box with the reference's answer."""
        return float(equal_as_text(final_answer(response, self._think_boxes), answer_of(reference)))
