"""The `jsonl` source: a file with one JSON object per line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.data.rows import BadRow, collect_examples, kind_of, raise_for_rows, read_file
from retrain.errors import ConfigError, ConfigIssue
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema


class JsonlSource:
    """Rows with `prompt`, `problem` or `question` and `answer` or `solution`, or the fields named in `[data]`."""

    def __init__(self, section: schema.Data) -> None:
        self._section = section

    def load(self) -> list[Example]:
        """Read the file; one error reports all invalid lines by number."""
        content = read_file(self._section, ".jsonl")
        return collect_examples(_read_lines(content), self._section, str(Path(self._section.path).expanduser()))


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with one object per line, with a list of objects, or with one object after the other.

    Values are those of the file: libraries of tables read texts such as 2024-01-05 as times. Raises ConfigError.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    rows = list(_read_lines(content))
    if content.lstrip().startswith(b"[") or any(isinstance(row, BadRow) for _, row in rows):
        values = _read_values(content, path)
        rows = rows if values is None else values
    reasons = [(where, _why_no_object(row)) for where, row in rows]
    issues = [ConfigIssue(where, reason) for where, reason in reasons if reason]
    if issues:
        raise_for_rows(issues, str(path))
    return [row for _, row in rows if isinstance(row, dict)]


def _read_values(content: bytes, path: Path) -> list[tuple[str, object]] | None:
    """The objects of a list, or those that follow each other; None if the file is none of these."""
    try:
        text = content.decode()
        values, at = [], _skip_space(text, 0)
        while at < len(text):
            value, end = json.JSONDecoder().raw_decode(text, at)
            values.append(value)
            at = _skip_space(text, end)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):
            return None
        raise ConfigError(f"{path} is not JSON ({error.msg}, line {error.lineno}, column {error.colno}).") from error
    except (ValueError, RecursionError):
        return None
    found = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return [(f"object {number}", value) for number, value in enumerate(found, start=1)]


def _skip_space(text: str, at: int) -> int:
    found = re.compile(r"\s*").match(text, at)
    assert found is not None
    return found.end()


def _why_no_object(row: object) -> str:
    if isinstance(row, dict):
        return ""
    return str(row) if isinstance(row, BadRow) else f"is {kind_of(row)}, not an object with fields"


def _read_lines(content: bytes) -> Iterator[tuple[str, object]]:
    # Only a newline ends a row: text may contain other characters that Unicode counts as line breaks.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse_line(line)


def _parse_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        return BadRow(f"is not JSON ({error.msg}, column {error.colno}); each line holds one object")
    except ValueError as error:
        return BadRow(f"is not JSON ({error})")
    except RecursionError:
        return BadRow("is nested too deeply")
