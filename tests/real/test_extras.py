"""Every documented installation has a solution under constraints.txt, on every Python that retrain supports."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from .conftest import Prepare

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# First releases: distributions keep them for years, and some packages want a later one.
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", ["", *EXTRAS])
@pytest.mark.timeout(600)
def test_an_extra_can_be_installed_with_the_pinned_versions(side_venv: Prepare, extra: str, python: str) -> None:
    uv = side_venv("uv", [["install", "uv"]]).with_name("uv")
    chosen = ["--extra", extra] if extra else []
    # Mirrors may have a package in several places, with other versions.
    done = subprocess.run(
        [uv, "pip", "compile", "--quiet", "--index-strategy", "unsafe-best-match", "--python-version", python,
         "-c", "constraints.txt", *chosen, "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
