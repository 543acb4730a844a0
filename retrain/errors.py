"""Errors raised to users.

    RetrainError
    ├── ConfigError         invalid TOML, flag or file                                exit 2
    ├── PluginError         a plugin is missing, invalid or returned invalid values  exit 1
    ├── MissingExtraError   an optional dependency is not installed                   exit 2
    ├── BackendError        the training backend failed                               exit 1
    ├── RolloutError        sampling or scoring failed                                exit 1
    │   └── SamplingMemoryError     sampling needs more memory than there is          exit 1
    └── CheckpointError     a checkpoint is missing, corrupt or from another run      exit 2

A message says what is wrong, where, what was found and what to try. Only `retrain.cli.main` prints one and exits.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class RetrainError(Exception):
    """Base class of all errors that retrain raises."""

    exit_code = 1
    next_step = ""
    """A line printed below the message: how to resume the run."""


@dataclass(frozen=True)
class ConfigIssue:
    """One thing wrong with a configuration.

    `where` names the table and key (`[training] lr`), `text` says what is wrong with it, `hint` what to do.
    """

    where: str
    text: str
    hint: str = ""
    tables: tuple[str, ...] = ()
    """Tables that the issue compares, or in which a default now replaces a value that could not be used."""

    def __str__(self) -> str:
        line = f"{self.where} {self.text}".strip()
        return f"{line}  {self.hint}" if self.hint else line


class ConfigError(RetrainError):
    """A configuration cannot be run; carries every issue found, not only the first."""

    exit_code = 2

    def __init__(self, message: str, issues: tuple[ConfigIssue, ...] = ()) -> None:
        self.issues = issues
        super().__init__("\n".join([message, *(f"  {issue}" for issue in issues)]))


class PluginError(RetrainError):
    """A plugin could not be found, is not of its kind, or returned an invalid value."""


@contextmanager
def blaming(
    plugin: str, where: str, is_excused: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """Turn exceptions of third-party code into a PluginError with its name and the place."""
    try:
        yield
    except RetrainError:
        raise
    # SystemExit: a plugin that calls sys.exit must not end the run silently.
    except (Exception, SystemExit) as error:
        if is_excused(error):
            raise
        raise PluginError(f"{plugin} raised {error!r} {where}{_line_of(error)}.") from error


def _line_of(error: BaseException) -> str:
    """The last line that an error went through in code that is not an installed package."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


class MissingExtraError(RetrainError):
    """The chosen options require an optional dependency that is not installed."""

    exit_code = 2


class BackendError(RetrainError):
    """The training backend failed: model loading, memory, a remote service."""


class RolloutError(RetrainError):
    """Sampling or scoring failed for too much of a batch to train on the rest."""


class SamplingMemoryError(RolloutError):
    """Sampling needs more memory than there is."""


class CheckpointError(RetrainError):
    """A checkpoint is missing, corrupt, or belongs to a different run."""

    exit_code = 2
