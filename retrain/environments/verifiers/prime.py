"""Installing an environment from the Environments Hub, by the Prime CLI and by nothing else.

Environment names on the public package index belong to unrelated packages, so an id never goes to pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from retrain.environments import Say
from retrain.errors import ConfigError

_LIMIT_S = 900


def install_environment(id: str, say: Say) -> None:
    """Run `prime env install`, showing what is run; an id without an owner is not one of the Hub's."""
    if "/" not in id:
        raise ConfigError(
            f'[environment] id = {id!r} has no owner, so it cannot be installed.  Try: id = "owner/{id}", '
            "or install it yourself and leave auto_install out."
        )
    command = [*_prime(), "env", "install", id]
    say(f"Running: {' '.join(command)}")
    try:
        # The CLI hands the package to uv, which installs into the environment that this variable names.
        own = {**os.environ, "VIRTUAL_ENV": sys.prefix}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=own)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)} did not finish: {error}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"{' '.join(command)} failed with exit code {done.returncode}: {said}")


def _prime() -> list[str]:
    """The Prime CLI, installed or by way of uv."""
    if shutil.which("prime"):
        return ["prime"]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "prime"]
    raise ConfigError(
        "[environment] auto_install = true needs the Prime CLI.  "
        f"Try: {sys.executable} -m pip install prime, or install uv."
    )
