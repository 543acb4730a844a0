"""Real software, each piece in a virtual environment of its own that is made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Prepare = Callable[..., Path]


@pytest.fixture(scope="session")
def side_venv() -> Prepare:
    """A function from a name and a list of pip argument lists to the interpreter of a virtual environment with them.

    A third argument is one more command that installs into it, given the interpreter's path by `--python`.
    """
    home = Path(os.environ.get("RETRAIN_REAL", ".real")).resolve()

    def prepare(name: str, installs: Sequence[Sequence[str]], other: Sequence[str | Path] = ()) -> Path:
        python, stamp = home / name / "bin" / "python", home / name / "installed.txt"
        wanted = repr(list(map(list, installs))) + (repr(list(map(str, other))) if other else "")
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home / name], check=True)
            for arguments in installs:
                subprocess.run([python, "-m", "pip", *arguments], check=True)
            if other:
                subprocess.run([*other, "--python", python], check=True)
            stamp.write_text(wanted)
        return python

    return prepare
