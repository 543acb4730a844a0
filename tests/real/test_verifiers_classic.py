"""Environments in the style of verifiers before 0.4, with verifiers 0.3.1."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.real.conftest import Prepare

pytestmark = pytest.mark.real
TESTS = Path(__file__).parents[1] / "environments" / "classic_checks.py"


def test_classic_environments_are_played_as_the_new_ones_are(side_venv: Prepare) -> None:
    # omegaconf, which pytest loads as a plugin, reads grammars of this version only.
    python = side_venv("verifiers-classic", [["install", "verifiers==0.3.1", "antlr4-python3-runtime==4.9.3"]])
    # Everything else comes from the environment of the tests; what is installed here is found first.
    shared = sysconfig.get_path("purelib")
    (next(python.parents[1].glob("lib/python*/site-packages")) / "zz_shared.pth").write_text(f"{shared}\n")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(TESTS)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
