"""Errors of the user's code as text: a line that says what was raised, and where."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType

from retrain.errors import PluginError, RetrainError
from retrain.isolation.redaction import redact

# Ours, and Python's while it imports a module.
_FOLDERS = (Path(__file__).parents[1], Path(importlib.__file__).parent)
_NOT_OF_USER = ("<frozen importlib", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_LONGEST = 4000


def describe_error(error: BaseException) -> str:
    """The error in one line; if the user's code raised it, the traceback follows."""
    if isinstance(error, RetrainError):
        cause = error.__cause__ if isinstance(error, PluginError) else None
        text = "\n".join([str(error), *map(str.strip, traceback.format_exception_only(error)[1:])])  # with its notes
        return text if cause is None or _says_all(cause) else f"{text}\n{format_traceback(cause)}"
    return f"{summarize_error(error)}\n{format_traceback(error)}"


def summarize_error(error: BaseException) -> str:
    """The error in one line."""
    lines = [str(error)] if isinstance(error, RetrainError) else traceback.format_exception_only(error)
    # The first lines of a syntax error are the place, and the last ones its notes.
    named = [line for line in lines if isinstance(error, SyntaxError) and line.startswith(type(error).__name__)]
    return redact((named or lines)[0]).strip().partition("\n")[0]


def format_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the user's code; of a long one, the end."""
    frames = _after_own(error.__traceback__)
    if frames is None and not isinstance(error, SyntaxError):  # which says itself where it is
        frames = error.__traceback__
    lines = traceback.format_exception(type(error), error, frames)
    text = redact("".join(lines)).strip()  # before it is cut: a part of a secret is not recognized
    return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"


def _says_all(error: BaseException) -> bool:
    """Whether the message suffices: a module was not found, or none of the user's code had a part in it."""
    in_user_code = isinstance(error, SyntaxError) or _after_own(error.__traceback__) is not None
    return isinstance(error, ModuleNotFoundError) or not in_user_code


def _after_own(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_NOT_OF_USER):
        frames = frames.tb_next
    return frames
