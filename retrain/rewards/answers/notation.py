r"""Normalization of notation: Unicode, LaTeX synonyms, spacing, thousands separators."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+")
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/", "÷": "/",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
        "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
        "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
        "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ",
        "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ",
        "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
        "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "",
    }
)  # fmt: skip

_ROW_END = "\x00"  # placeholder for `\\`, whose second backslash must not start a command
_SYNONYMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|sf|tt)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:h|v)?phantom\s*(?:\{[^{}]*\}|[^{\\])", ""),
        (r"\\le(?![A-Za-z])|\\leqslant(?![A-Za-z])", r"\\leq"),
        (r"\\ge(?![A-Za-z])|\\geqslant(?![A-Za-z])", r"\\geq"),
        (r"\\ne(?![A-Za-z])", r"\\neq"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\lparen(?![A-Za-z])", "("),
        (r"\\rparen(?![A-Za-z])", ")"),
        (r"\\(?:l|r)?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:dots|cdots|dotsc)(?![A-Za-z])|\.\.\.", r"\\ldots"),
        (r"\\(?:degree|degrees)(?![A-Za-z])", r"^\\circ "),
        (r"\\colon(?![A-Za-z])|\\ratio(?![A-Za-z])", ":"),
        (r"\\(?:textsuperscript)\s*\{", "^{"),
        (r"\\textdollar(?![A-Za-z])", r"\\$"),
        (r"\\(?:euro|texteuro)(?![A-Za-z])", "€"),
        (r"\\(?:pounds|textsterling)(?![A-Za-z])", "£"),
        (r"\\(?:yen|textyen)(?![A-Za-z])|￥", "¥"),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|bold)\s*\{([^{}]*)\}", r"{\1}"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
    )
)
_ORDINAL = re.compile(
    r"(?<=\d)(?:\^?\s*\{?\s*\\(?:text|mathrm|mbox)\{(?:st|nd|rd|th)\}\s*\}?|(?:st|nd|rd|th)(?![A-Za-z]))"
)
_PREAMBLE = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?(?:answer|result|solution)\s*(?:\bis\b\s*:?|:|=)\s*(?=\S)",
    re.IGNORECASE,
)
_MATH_DELIMITER = re.compile(r"\\[()\[\]]|(?<!\\)\$")
# `1,\!000` and `1{,}000` are always separators.
_SEPARATOR = re.compile(r"(?<=\d)(?:,\s*\\!\s*|\\!\s*,|\{,\})(?=\d{3}(?!\d))")
_TIGHT = re.compile(r"\\!|\{\}(?=\d)")
# `10\,000`, the separator of the SI.
_THIN_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:\\,\d{3})+(?![\d,])")
_BLANK_GROUPS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SPACE = re.compile(r"\\[,;:> ]|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)?space(?![A-Za-z])|~|\s+")
_GROUPS = re.compile(r"(?<![\d.,_^])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_OPENING = re.compile(r"\\\{|\\langle|[(\[]")
_CLOSING = re.compile(r"\\\}|\\rangle|[)\]]")


@lru_cache(maxsize=8192)
def tidy(answer: str) -> str:
    r"""Normalize the notation of an answer. Spaces are kept where they may matter."""
    text = answer.strip()
    if preamble := _PREAMBLE.match(text):
        text = text[preamble.end() :]
    if not text.isascii():
        text = _to_latex(text)
    text = text.replace("\\\\", _ROW_END)
    text = _MATH_DELIMITER.sub("", text)
    for pattern, replacement in _SYNONYMS if "\\" in text or "..." in text else ():
        text = pattern.sub(replacement, text)
    text = _TIGHT.sub("", _SEPARATOR.sub("", text).replace("{,}", ","))
    text = _THIN_GROUPS.sub(lambda found: found[0].replace("\\,", ""), text)
    text = _SPACE.sub(" ", _ORDINAL.sub("", text)).strip().rstrip(" .,;").strip()
    text = text.strip("*_`\"' ") if text[:1] in "*_`\"'" else text
    if _BLANK_GROUPS.fullmatch(text):
        text = text.replace(" ", "")
    return _join_thousands(text).replace(_ROW_END, "\\\\").strip()


def _to_latex(text: str) -> str:
    text = _RAISED.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    text = "".join(_vulgar_fraction(sign) if "VULGAR" in unicodedata.name(sign, "") else sign for sign in text)
    return unicodedata.normalize("NFKC", text.translate(_UNICODE))


def _vulgar_fraction(sign: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}" if bottom else sign


def _join_thousands(text: str) -> str:
    """Remove thousands separators: commas without a space between groups of three digits.

    In brackets `(100,101)` is a pair, unless other commas with a space separate the entries.
    """

    def join(found: re.Match[str]) -> str:
        before = text[: found.start()]
        bracketed = len(_OPENING.findall(before)) > len(_CLOSING.findall(before))
        return found[0] if bracketed and ", " not in text else found[0].replace(",", "")

    return _GROUPS.sub(join, text)
