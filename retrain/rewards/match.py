r"""The `match` reward: the last `\boxed{…}` of the response against the reference, as normalised text.

It knows notation, not algebra: `\dfrac12` equals `\frac{1}{2}`, but `0.5` does not. The `math` reward does that.
"""

from __future__ import annotations

import re
from functools import lru_cache

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)\s+([0-9A-Za-z])|\\.|[{}]", re.DOTALL)

_SPACING = re.compile(r"\\[!,;:> ]|\\q?quad(?![A-Za-z])|~|\\displaystyle(?![A-Za-z])|\s+")
_DELIMITER_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_BARE_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([0-9A-Za-z]))(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_SLASH_FRACTION = re.compile(r"(-?)(\d+)/(\d+)")
_BARE_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
# A unit is text that follows a value to the end of the answer, perhaps raised to a power: `5\text{ cm}^2`.
_TRAILING_UNIT = re.compile(
    r"(?<=[0-9})a-z])\\(?:text(?:rm|normal)?|mbox|mathrm)\s*\{\s*(?![ap]\.?m\b)[A-Za-z][^{}]*\}(?:\^\{?\d\}?)?$"
)
_DEGREE = re.compile(r"\^?\{?\\circ\}?|\\degree(?![A-Za-z])|°")
_CURRENCY_OR_PERCENT = re.compile(r"\\?[$%]")
_ASSIGNMENT = re.compile(r"^[A-Za-z](?:=|\\in(?![A-Za-z]))(?=[^=]+$)")
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"([+-]?)(\d*)\.(\d*)")
_BRACED_SCRIPT = re.compile(r"([_^])\{([0-9A-Za-z])\}")
_SYNONYMS = (
    (re.compile(r"\\le(?![A-Za-z])"), r"\\leq"),
    (re.compile(r"\\ge(?![A-Za-z])"), r"\\geq"),
    (re.compile(r"\\ne(?![A-Za-z])"), r"\\neq"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\u2212"), "-"),
    (re.compile(r"\{,\}"), ","),
)


def last_boxed(text: str) -> str:
    r"""Return what the last `\boxed{…}` that closes holds, braces balanced, or "" when there is none.

    One pass, so that a completion that repeats `\boxed{` thousands of times costs no more than any other.
    """
    start = text.find("\\boxed")
    fbox = text.find("\\fbox")
    if start < 0 or 0 <= fbox < start:
        start = fbox
    if start < 0:
        return ""
    opened_at: list[int] = []  # where the content of each open group begins; -1 for a group that is no box
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


def answer_of(reference: str) -> str:
    r"""Return the answer a reference stands for: its last box when it is a whole solution, else all of it."""
    return last_boxed(reference) or reference.strip()


@lru_cache(maxsize=4096)  # a group shares its reference, and mostly its answers
def normalise(answer: str) -> str:
    """Rewrite an answer so that two spellings of one notation become the same text."""
    text = _DELIMITER_SIZE.sub("", answer.strip().rstrip(".").strip("$"))
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    # Units go before whitespace does: the blank in `5\ \text{cm}` is what the unit hangs on.
    text = _SPACING.sub(" ", text)
    text = _TRAILING_UNIT.sub("", re.sub(r"\s+(?=\\(?:text|mbox|mathrm))", "", text).strip().rstrip(" .,"))
    text = _TEXT.sub(r"\1", text)
    text = _CURRENCY_OR_PERCENT.sub("", _DEGREE.sub("", text))
    text = "".join(text.split()).rstrip(".,")
    text = _BRACED_SCRIPT.sub(r"\1\2", _ASSIGNMENT.sub("", text))
    while len(text) > 2 and text[0] == "{" and text[-1] == "}" and text.count("{") == 1:
        text = text[1:-1]
    return _normalise_word(_normalise_number(_normalise_fractions(text)))


def _normalise_fractions(text: str) -> str:
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(r"\\frac", text))
    text = _BARE_FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[2]}}}{{{found[3] or found[4]}}}", text)
    whole = _SLASH_FRACTION.fullmatch(text)
    if whole:
        return f"{whole[1]}\\frac{{{whole[2]}}}{{{whole[3]}}}"
    return re.sub(r"^\\frac\{-", r"-\\frac{", text)


def _normalise_number(text: str) -> str:
    if _GROUPED_NUMBER.fullmatch(text):
        text = text.replace(",", "")
    decimal = _DECIMAL.fullmatch(text)
    if decimal and (decimal[2] or decimal[3]):
        fraction = decimal[3].rstrip("0")
        text = f"{decimal[1]}{decimal[2] or '0'}" + (f".{fraction}" if fraction else "")
    if re.fullmatch(r"\+[\d.]+", text):
        text = text[1:]
    return text


def _normalise_word(text: str) -> str:
    # One letter is a variable or a choice, where the case may matter; a longer word is a word.
    return text.lower() if len(text) > 1 and text.isalpha() else text


def equal_as_text(answer: str, gold: str) -> bool:
    """Whether two bare answers are one and the same after normalisation; an empty answer equals nothing."""
    normal = normalise(answer)
    return normal != "" and normal == normalise(gold)


class MatchReward:
    r"""1.0 when the last box of the response reads like the reference, else 0.0."""

    def score(self, response: str, reference: str) -> float:
        """Compare the response's last box with the reference's answer."""
        return float(equal_as_text(last_boxed(response), answer_of(reference)))
