"""Installation of environments from the Environments Hub, only through the Prime CLI.

Packages of the same name on PyPI are unrelated, so an id is never passed to pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from retrain.environments import Log
from retrain.errors import ConfigError
from retrain.isolation.redaction import redact

_LIMIT_S = 900
_SHOWN_LINES = 8


def install_environment(id: str, log: Log) -> None:
    """Run `prime env install`; the id needs an owner."""
    if "/" not in id:
        raise ConfigError(
            f'[environment] id = {id!r} has no owner, so it cannot be installed.  Try: id = "owner/{id}", '
            "or install it yourself and set auto_install = false."
        )
    command = [*_prime(), "env", "install", id]
    log(f"Running: {' '.join(command)}")
    try:
        # The CLI uses uv, which installs into the environment of this variable.
        variables = {**os.environ, "VIRTUAL_ENV": sys.prefix}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)} did not finish: {error}") from error
    if done.returncode != 0:
        # It prints what is wrong on either; uv prints its progress on stderr.
        lines = [line for text in (done.stderr, done.stdout) for line in text.strip().splitlines()[-_SHOWN_LINES:]]
        shown = redact("; ".join(line.strip() for line in lines if line.strip())) or "no output"
        raise ConfigError(f"{' '.join(command)} failed with exit code {done.returncode}: {shown}")


def _prime() -> list[str]:
    """The Prime CLI, installed or through uv."""
    if shutil.which("prime"):
        return ["prime"]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "prime"]
    raise ConfigError(
        "[environment] auto_install = true needs the Prime CLI.  "
        f"Try: {sys.executable} -m pip install prime, or install uv."
    )
