"""What the command line does before any command runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.cli import limit_openmp_spinning


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_that_wait_sleep_soon_unless_configured_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: dict[str, str]
) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    limit_openmp_spinning()
    assert environment == expected


def test_scripts_that_import_the_trainer_first_have_the_same_threads() -> None:
    code = "import os, retrain.grpo, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    given = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10000", "False"]


def test_a_character_that_the_output_cannot_encode_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "√.toml").write_text('[model]\nmodel = "builtin:tiny"\n')
    done = subprocess.run(
        [sys.executable, "-m", "retrain", "explain", "√.toml"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(rb"\u221a.toml: a training run")


@pytest.mark.parametrize("arguments", [["plugins"], ["--version"], ["explain", "run.toml", "--json"]])
def test_a_full_disk_under_the_output_is_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "run.toml").write_text('[model]\nmodel = "builtin:tiny"\n')
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "retrain", *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "error: the output cannot be written: No space left on device.  Try: free some space\n"
    assert done.returncode == 1
