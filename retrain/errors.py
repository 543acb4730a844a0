"""The errors a user can meet.

    RetrainError
    ├── ConfigError         the TOML, a flag or a file the user named is wrong        exit 2
    ├── PluginError         a plug-in is missing, misshapen or returned nonsense      exit 1
    ├── MissingExtraError   an optional dependency is not installed                   exit 2
    ├── BackendError        the training side failed                                  exit 1
    ├── RolloutError        sampling or scoring failed                                exit 1
    └── CheckpointError     a checkpoint is absent, corrupt or of another run         exit 2

A message says what is wrong, where, what was found and what to try. Only `retrain.cli.main` prints one and exits.
"""

from __future__ import annotations

from dataclasses import dataclass


class RetrainError(Exception):
    """Root of every error that retrain raises on purpose."""

    exit_code = 1
    next_step = ""
    """A line to print below the message: how the run is resumed."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    `where` names the table and key (`[training] lr`), `text` says what is wrong with it, `hint` what to do.
    """

    where: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.where} {self.text}".strip()
        return f"{line}  {self.hint}" if self.hint else line


class ConfigError(RetrainError):
    """What the user wrote cannot be run; carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        self.problems = problems
        super().__init__("\n".join([message, *(f"  {problem}" for problem in problems)]))


class PluginError(RetrainError):
    """A plug-in could not be found, has the wrong shape, or returned something unusable."""


class MissingExtraError(RetrainError):
    """An optional dependency is needed by the chosen options and is not installed."""

    exit_code = 2


class BackendError(RetrainError):
    """The training side failed: a model that will not load, memory, a remote service."""


class RolloutError(RetrainError):
    """Sampling or scoring failed for so much of a batch that training on it would mislead."""


class CheckpointError(RetrainError):
    """There is no checkpoint to resume from, it is damaged, or it belongs to a different run."""

    exit_code = 2
