"""The error tree: exit codes and how problems are printed."""

from __future__ import annotations

import pytest

from retrain import errors
from retrain.errors import ConfigError, ConfigIssue, RetrainError


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("RetrainError", 1),
        ("ConfigError", 2),
        ("PluginError", 1),
        ("MissingExtraError", 2),
        ("BackendError", 1),
        ("RolloutError", 1),
        ("CheckpointError", 2),
    ],
)
def test_an_error_has_the_exit_code_that_the_docstring_draws(name: str, exit_code: int) -> None:
    kind = vars(errors)[name]
    assert issubclass(kind, RetrainError)
    assert kind.exit_code == exit_code
    drawn = next((line for line in (errors.__doc__ or "").splitlines() if f"─ {name} " in line), "")
    assert name == "RetrainError" or drawn.endswith(f"exit {exit_code}")


def test_every_error_is_drawn_in_the_docstring() -> None:
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RetrainError)]
    assert all(name in (errors.__doc__ or "") for name in kinds)


def test_a_problem_reads_as_where_what_and_what_to_do() -> None:
    assert str(ConfigIssue("[a] b", "is wrong.", "Try: c")) == "[a] b is wrong.  Try: c"
    assert str(ConfigIssue("[a] b", "is wrong.")) == "[a] b is wrong."
    assert str(ConfigIssue("unknown table [a].", "", "Did you mean [b]?")) == "unknown table [a].  Did you mean [b]?"
    assert str(ConfigIssue("", "and 3 more.")) == "and 3 more."


def test_a_config_error_lists_its_problems_below_its_message() -> None:
    error = ConfigError("run.toml has 2 problems:", (ConfigIssue("[a]", "x."), ConfigIssue("[b]", "y.", "Try: z")))
    assert str(error) == "run.toml has 2 problems:\n  [a] x.\n  [b] y.  Try: z"
    assert str(ConfigError("no file")) == "no file"
