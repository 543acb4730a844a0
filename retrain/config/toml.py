"""Reading TOML, with errors that point at the line, and writing it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from retrain.errors import ConfigError

# A configuration has a few kB; a larger file was named by mistake.
MAX_BYTES = 1_000_000
# Far above any real file, far below where parsing, copying and dumping overflow the stack.
MAX_DEPTH = 32
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)")
# tomllib's words for a key and for a table that were already there; the position is behind the second one.
_TWICE = ("Cannot overwrite a value", "Cannot declare ")
_NAMED = re.compile(r"\s*(?:\[\s*(?P<table>[^\[\]]+?)\s*\]|(?P<key>[^\s=#\[\]][^=#]*?)\s*=)")
# tomllib needs quadratic time and memory for dotted keys, so a long one is rejected before parsing.
_LONG_DOTTED_KEY = re.compile(r"(?<![^\s=#\[\]{},])(?:[^\s.=#\[\]{},]+\.){200}")
_LONG_NUMBER = re.compile(r"[0-9](?:_?[0-9]){4299}")
_SHOWN_LINE = 100
_SHOWN_VALUE = 60
# Python does not print integers of more than 4,300 decimal digits; in TOML they can only be written as 0x....
_DECIMAL_BITS = 14_000


def read_text(path: Path) -> str:
    """The text of a TOML file; raises ConfigError with one sentence."""
    name = show_path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{name} is a folder, not a TOML file.  Try: name the file inside it.")
        if path.suffix in (".yaml", ".yml") and path.exists():
            raise ConfigError(f"{name} is a YAML file, and only `retrain grpo` reads those.  Try: a TOML file.")
        # Bounded, because pipes and /dev files report no size.
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
            size = max(len(raw), path.stat().st_size)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {name}.  Try: retrain init") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL byte in it.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{name} cannot be read: {reason}.  Try: check the path and its permissions.") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{name} has {size / 1e6:.1f} MB; a configuration has at most {MAX_BYTES / 1e6:.0f} MB.  "
            "Try: name a TOML file."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not a text file (byte {error.start} is not UTF-8).  Try: name a TOML file, saved as UTF-8."
        ) from error


def show_path(path: Path) -> str:
    """A path for messages, quoted if it contains characters that are not printable."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def parse_toml(text: str, name: str) -> dict[str, object]:
    """Parse TOML text; `name` is its name in messages."""
    long_key = _LONG_DOTTED_KEY.search(text)
    if long_key:
        line = text.count("\n", 0, long_key.start()) + 1
        raise ConfigError(f"{name} is not a configuration: line {line} is nested too deeply.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {_point_at(text, str(error))}") from error
    except RecursionError as error:
        lines = text.split("\n")
        line = max(range(len(lines)), key=lambda n: lines[n].count("[") + lines[n].count("{")) + 1
        raise ConfigError(f"{name} is not a configuration: line {line} is nested too deeply.") from error
    except ValueError as error:
        number = _LONG_NUMBER.search(text)
        place = f" (line {text.count(chr(10), 0, number.start()) + 1})" if number else ""
        reason = "it holds a number that is too large" if number else str(error)
        raise ConfigError(f"{name} cannot be read: {reason}{place}.") from error


def _point_at(text: str, message: str) -> str:
    """The message and the line, with a caret under the column."""
    # Only \n ends a line in TOML; str.splitlines has more separators and would count differently.
    lines = text.replace("\r\n", "\n").split("\n")
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    position = _POSITION.search(message)
    line, column = (int(position[1]), int(position[2])) if position else (len(lines), len(lines[-1]) + 1)
    reason = _POSITION.sub("", message).replace("(at end of document)", "at the end of the file").strip()
    if line > len(lines):
        line, column = len(lines), len(lines[-1]) + 1
    if reason.startswith(_TWICE):
        reason, line, column = _explain_twice(lines, line) or (reason, line, column)
    # A control character would move the cursor and misplace the caret.
    shown = "".join(
        char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in lines[line - 1]
    )
    start = max(0, column - _SHOWN_LINE) if len(shown) > _SHOWN_LINE else 0
    # Tabs are kept, so that the caret lines up.
    indent = re.sub(r"[^\t]", " ", shown[start : column - 1])
    margin = f"  {line} | "
    return f"{reason} (line {line})\n{margin}{shown[start : start + _SHOWN_LINE]}\n{' ' * len(margin)}{indent}^"


def _explain_twice(lines: list[str], line: int) -> tuple[str, int, int] | None:
    """The key or table that is set twice, with the line and column of its name; None if it cannot be found."""
    # A value may span several lines.
    for number in range(line, 0, -1):
        if named := _NAMED.match(lines[number - 1][:_SHOWN_LINE]):
            reason = f"{named['key']} is set twice" if named["key"] else f"the table [{named['table']}] appears twice"
            return reason, number, named.start("key" if named["key"] else "table") + 1
    return None


def is_too_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether tables and lists are nested more than `limit` levels; does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [inner for item in level for inner in _items(item)]
        if not level:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def format_value(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{format_key(str(key))} = {format_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS:
        return hex(value)
    return str(value)


def show_value(value: object) -> str:
    """A value for messages: truncated if long, and printable on any UTF-8 terminal."""
    # A flag may contain bytes that are not valid UTF-8.
    text = format_value(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN_VALUE else f"{text[: _SHOWN_VALUE - 3]}..."


def format_key(key: str) -> str:
    """A key, quoted if TOML requires it."""
    return key if _BARE_KEY.fullmatch(key) else format_value(key)


def format_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """A document with one level of tables."""
    blocks = [
        "\n".join(
            [f"[{format_key(name)}]", *(f"{format_key(key)} = {format_value(value)}" for key, value in table.items())]
        )
        for name, table in tables.items()
    ]
    return "\n\n".join(blocks) + "\n"
