"""Conversion of raw rows to examples: which field is the prompt, which the answer, and which rows are invalid."""

from __future__ import annotations

import codecs
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.data.order import write_number
from retrain.errors import ConfigError, ConfigIssue
from retrain.rewards.match import last_boxed
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

PROMPT_FIELDS = ("prompt", "problem", "question")
ANSWER_FIELDS = ("answer", "solution")
BOX_INSTRUCTION = r"Put your final answer within \boxed{}."

_SHOWN_ISSUES = 5
# Exactly the last line of a GSM8K answer: `####` also occurs in code and in Markdown.
_GSM8K_LAST_LINE = re.compile(r"####\s*([-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
# Of one line each: `doctor` shows them in a table.
_PRINT_ROWS = "import {modules}; [print(json.dumps(row, default=str)) for row in {rows}]"
_FROM_TABLE = 'csv.DictReader(open(sys.argv[1], encoding="{encoding}", newline=""), delimiter="{delimiter}")'
_FROM_ARRAY = 'json.load(open(sys.argv[1], encoding="{encoding}"))'
_GUESSED_ENCODING = "It is not UTF-8 either; if it is not Western European text, replace cp1252 by its encoding."
_FROM_PARQUET = "datasets.Dataset.from_parquet(sys.argv[1])"

Row = Mapping[str, Any]
Prompt = str | tuple[Mapping[str, str], ...]


def read_file(section: schema.Data, suffix: str) -> bytes:
    """The content of `[data] path`; `suffix` is that of the files which the source reads."""
    if not section.path:
        problem = ConfigIssue("[data] path", "is empty.", f'Try: path = "problems{suffix}"')
        raise ConfigError(f'source = "{section.source}" needs a file.', (problem,))
    path = Path(section.path).expanduser()
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()}).") from error
    except IsADirectoryError as error:
        inside = sorted(file.name for file in path.glob(f"*{suffix}"))
        hint = f"  It holds {', '.join(inside[:5])}." if inside else ""
        raise ConfigError(f"{path} is a folder; [data] path must name one {suffix} file.{hint}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if script := _conversion_script(path, content):
        made = path.with_suffix(suffix)
        if made.exists():
            made = path.with_name(path.name + suffix)
        command = f"python -c {shlex.quote(script)} {shlex.quote(str(path))} > {shlex.quote(str(made))}"
        guess = f"  {_GUESSED_ENCODING}" if "cp1252" in script else ""
        raise ConfigError(f"{path} does not have one JSON object per line.{guess}  To convert it: {command}")
    return content


def _conversion_script(path: Path, content: bytes) -> str:
    """Python code that prints the rows of a file of another format, one per line; empty if it has none of those."""
    suffix = path.suffix.lower()
    encoding = _find_encoding(content) if suffix in (".csv", ".tsv", ".json") else ""
    if suffix in (".csv", ".tsv") and content:
        header = re.sub(rb'"[^"]*"', b"", content.partition(b"\n")[0])
        # Spreadsheets write semicolons where the comma is the decimal mark.
        delimiter = max((b",", b";", b"\t"), key=header.count)
        rows = _FROM_TABLE.format(delimiter=delimiter.decode().replace("\t", r"\t"), encoding=encoding)
        return _PRINT_ROWS.format(modules="csv, json, sys", rows=rows)
    if suffix == ".json" and content.decode(encoding, errors="ignore").lstrip().startswith("["):
        return _PRINT_ROWS.format(modules="json, sys", rows=_FROM_ARRAY.format(encoding=encoding))
    if content.startswith(b"PAR1"):
        return _PRINT_ROWS.format(modules="datasets, json, sys", rows=_FROM_PARQUET)
    return ""


def _find_encoding(content: bytes) -> str:
    """That of a file which another program wrote; spreadsheets write all of these."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


class BadRow(Exception):
    """Why a row is not a valid example."""


def final_answer(text: str) -> str:
    r"""Return the final answer of a solution: its last `\boxed{}`, or a GSM8K number; "" if it has neither."""
    return last_boxed(text) or gsm8k_answer(text)


def gsm8k_answer(text: str) -> str:
    """Return the number of a last line like `#### 1,234`, without thousands separators, or ""."""
    found = _GSM8K_LAST_LINE.fullmatch(text.rstrip().rpartition("\n")[2])
    return found[1].replace(",", "") if found else ""


def to_example(row: object, section: schema.Data, id: str) -> Example:
    """Convert one row; raises BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"is {kind_of(row)}, not an object with fields; each line holds one problem")
    prompt_field = _pick_field(row, section.prompt_field, PROMPT_FIELDS, "prompt_field")
    answer_field = _pick_field(row, section.answer_field, ANSWER_FIELDS, "answer_field")
    meta = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    prompt = read_prompt(row[prompt_field], prompt_field)
    return Example(prompt, read_answer(row[answer_field], answer_field, section.answer_field != ""), id, meta)


def collect_examples(rows: Iterable[tuple[str, object]], section: schema.Data, origin: str) -> list[Example]:
    """Convert rows, each given with its location; one error reports all invalid ones."""
    examples: list[Example] = []
    issues: list[ConfigIssue] = []
    for where, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            examples.append(to_example(row, section, where))
        except BadRow as bad:
            issues.append(ConfigIssue(where, str(bad)))
    if issues:
        raise_for_rows(issues, origin)
    if not examples:
        raise ConfigError(f"{origin} has no rows.")
    return examples


def raise_for_rows(issues: Sequence[ConfigIssue], origin: str) -> None:
    """Raise one error for all invalid rows, with the first few of them."""
    shown = tuple(issues[:_SHOWN_ISSUES])
    rest = len(issues) - len(shown)
    more = (ConfigIssue("", f"and {rest} more."),) if rest else ()
    noun = "row" if len(issues) == 1 else "rows"
    raise ConfigError(f"{origin} has {len(issues)} invalid {noun}:", (*shown, *more))


def _pick_field(row: Row, named: str, candidates: Sequence[str], option: str) -> str:
    for field in (named,) if named else candidates:
        if row.get(field) is not None:
            return field
    empty = [field for field in ((named,) if named else candidates) if field in row]
    if empty:
        raise BadRow(f"has null as its {empty[0]!r}")
    wanted = f"no field {named!r}" if named else f"none of the fields {', '.join(candidates)}"
    hint = "" if named else f" (to name another: [data] {option})"
    raise BadRow(f"has {wanted}; it has {', '.join(map(_show_name, row)) or 'none at all'}{hint}")


def _show_name(field: object) -> str:
    """A field's name, with characters that cannot be seen escaped."""
    return str(field) if str(field).isprintable() else ascii(field)


def read_prompt(value: object, field: str) -> Prompt:
    """Text, or messages with role and content; raises BadRow."""
    if value == "" or (isinstance(value, str) and value.isspace()):
        raise BadRow(f"has an empty {field!r}")
    if isinstance(value, str):
        return _check_unicode(value, field)
    if not isinstance(value, Sequence) or not value:
        raise BadRow(f"has {kind_of(value)} in {field!r}, where text or a list of messages belongs")
    return tuple(_read_message(message, field) for message in value)


def _read_message(message: object, field: str) -> dict[str, str]:
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _check_unicode(role, field), "content": _check_unicode(content, field)}
    raise BadRow(f"has a message without role and content in {field!r}")


def read_answer(value: object, field: str, named: bool) -> str:
    """The reference answer of a row; of a solution, its final answer. Raises BadRow."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"has {value} in {field!r}, where text or a number belongs")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return write_number(value)
    if not isinstance(value, str):
        raise BadRow(f"has {kind_of(value)} in {field!r}, where text or a number belongs")
    if not value.strip():
        raise BadRow(f"has no answer in {field!r}")
    # Only a solution contains more than its answer; unit tests, for example, must reach a custom reward unchanged.
    extracted = final_answer(value) if field == "solution" else gsm8k_answer(value)
    if field == "solution" and not named and not extracted:
        hint = 'if it is the answer itself: [data] answer_field = "solution"'
        raise BadRow(rf"has a 'solution' without \boxed{{}} ({hint})")
    return _check_unicode(extracted or value, field)


def _check_unicode(text: str, field: str) -> str:
    """Reject an unpaired surrogate: JSON can encode one, but tokenizers and files cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"has an unpaired surrogate in {field!r} (character {error.start + 1})") from error
    return text


def kind_of(value: object) -> str:
    """A value in the words of JSON, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
