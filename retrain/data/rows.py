"""From raw rows to examples: which field is the prompt, which the answer, and what is wrong with the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigError, ConfigIssue
from retrain.rewards.match import last_boxed
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

PROMPT_FIELDS = ("prompt", "problem", "question")
ANSWER_FIELDS = ("answer", "solution")
BOX_INSTRUCTION = r"Put your final answer within \boxed{}."

_SHOWN_PROBLEMS = 5
# The last line of a GSM8K answer, and nothing looser: `####` also stands in code and in Markdown.
_GSM8K_LAST_LINE = re.compile(r"####\s*([-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")

Row = Mapping[str, Any]
Prompt = str | tuple[Mapping[str, str], ...]


class BadRow(Exception):
    """A row that cannot become an example, and why."""


def final_answer(text: str) -> str:
    r"""Return the answer that a solution ends in: its last `\boxed{}`, or a GSM8K number; "" when it has neither."""
    return last_boxed(text) or gsm8k_answer(text)


def gsm8k_answer(text: str) -> str:
    """Return the number of a last line like `#### 1,234`, without thousands separators, or ""."""
    found = _GSM8K_LAST_LINE.fullmatch(text.rstrip().rpartition("\n")[2])
    return found[1].replace(",", "") if found else ""


def to_example(row: object, section: schema.Data, id: str) -> Example:
    """Read one row, or raise a BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"is a {_kind(row)}, not an object with fields")
    prompt_field = _pick_field(row, section.prompt_field, PROMPT_FIELDS)
    answer_field = _pick_field(row, section.answer_field, ANSWER_FIELDS)
    meta = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    prompt = read_prompt(row[prompt_field], prompt_field)
    return Example(prompt, read_answer(row[answer_field], answer_field, section.answer_field != ""), id, meta)


def collect_examples(rows: Iterable[tuple[str, object]], section: schema.Data, origin: str) -> list[Example]:
    """Read all rows, each with the words that say where it is; the bad ones come in one error."""
    examples: list[Example] = []
    problems: list[ConfigIssue] = []
    for where, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            examples.append(to_example(row, section, where))
        except BadRow as bad:
            problems.append(ConfigIssue(where, str(bad)))
    if problems:
        raise_for_rows(problems, origin)
    if not examples:
        raise ConfigError(f"{origin} has no rows.")
    return examples


def raise_for_rows(problems: Sequence[ConfigIssue], origin: str) -> None:
    """Raise one error for all bad rows, naming the first few."""
    shown = tuple(problems[:_SHOWN_PROBLEMS])
    rest = len(problems) - len(shown)
    more = (ConfigIssue("", f"and {rest} more."),) if rest else ()
    noun = "row" if len(problems) == 1 else "rows"
    raise ConfigError(f"{origin} has {len(problems)} unusable {noun}:", (*shown, *more))


def _pick_field(row: Row, named: str, candidates: Sequence[str]) -> str:
    for field in (named,) if named else candidates:
        if row.get(field) is not None:
            return field
    wanted = f"no field {named!r}" if named else f"none of the fields {', '.join(candidates)}"
    raise BadRow(f"has {wanted}; it has {', '.join(map(str, row)) or 'none at all'}")


def read_prompt(value: object, field: str) -> Prompt:
    """Read text, or messages with role and content, or raise a BadRow."""
    if value == "" or (isinstance(value, str) and value.isspace()):
        raise BadRow(f"has an empty {field!r}")
    if isinstance(value, str):
        return _whole_text(value, field)
    if not isinstance(value, Sequence) or not value:
        raise BadRow(f"has a {_kind(value)} in {field!r}, where text or a list of messages belongs")
    return tuple(_read_message(message, field) for message in value)


def _read_message(message: object, field: str) -> dict[str, str]:
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _whole_text(role, field), "content": _whole_text(content, field)}
    raise BadRow(f"has a message without role and content in {field!r}")


def read_answer(value: object, field: str, named: bool) -> str:
    """Read the reference of a row, the final answer of a solution, or raise a BadRow."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 27.0 in a table of numbers is the answer 27
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"has a {_kind(value)} in {field!r}, where text or a number belongs")
    if not value.strip():
        raise BadRow(f"has no answer in {field!r}")
    # Only a solution is known to be more than its answer; unit tests, say, must reach a custom reward as they are.
    extracted = final_answer(value) if field == "solution" else gsm8k_answer(value)
    if field == "solution" and not named and not extracted:
        raise BadRow(r"has a 'solution' without \boxed{}")
    return _whole_text(extracted or value, field)


def _whole_text(text: str, field: str) -> str:
    """Refuse half a surrogate pair: JSON can spell one, and no tokenizer or file takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"has half a surrogate pair in {field!r} (character {error.start + 1})") from error
    return text


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
