"""What the command line does before any command runs."""

from __future__ import annotations

import os
import subprocess
import sys

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
