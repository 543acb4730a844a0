"""Cases that repeat what a quicker one shows: `make test-slow` runs them, `make test` does not."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The cases of a `parametrize`, marked slow."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
