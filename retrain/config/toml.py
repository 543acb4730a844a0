"""TOML in and out: reading with errors that point at the line, and writing values back."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError

# A configuration is a page or two; anything this large was named by mistake.
MAX_BYTES = 1_000_000
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a file, or say in one sentence why it cannot be a configuration."""
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, not a TOML file.  Try: name the file inside it.")
        if size > MAX_BYTES:
            raise ConfigError(f"{path} is {size / 1e6:.1f} MB; a configuration has at most {MAX_BYTES / 1e6:.0f} MB.")
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}.  Try: retrain init") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL byte in it.
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file (byte {error.start} is not UTF-8).") from error
    return parse_toml(text, str(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse TOML text; `name` is how messages call it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {_point_at(text, str(error))}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a configuration: its values are nested too deeply.") from error
    except ValueError as error:
        raise ConfigError(f"{name} holds a number that is too large: {error}.") from error


def _point_at(text: str, message: str) -> str:
    """The message, then the line it is about with a caret under the column."""
    lines = text.splitlines() or [""]
    position = _POSITION.search(message)
    line, column = (int(position[1]), int(position[2])) if position else (len(lines), len(lines[-1]) + 1)
    reason = _POSITION.sub("", message).replace("(at end of document)", "at the end of the file").strip()
    line = min(line, len(lines))
    # Tabs keep their place under tabs, so that the caret lines up.
    indent = re.sub(r"[^\t]", " ", lines[line - 1][: column - 1])
    margin = f"  {line} | "
    return f"{reason} (line {line})\n{margin}{lines[line - 1]}\n{' ' * len(margin)}{indent}^"


def format_value(value: object) -> str:
    """One value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{format_key(key)} = {format_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return str(value)


def format_key(key: str) -> str:
    """A key, quoted when TOML asks for it."""
    return key if _BARE_KEY.fullmatch(key) else format_value(key)


def format_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """A document of one level of tables."""
    blocks = [
        "\n".join(
            [f"[{format_key(name)}]", *(f"{format_key(key)} = {format_value(value)}" for key, value in table.items())]
        )
        for name, table in tables.items()
    ]
    return "\n\n".join(blocks) + "\n"
