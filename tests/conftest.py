from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> None:
    """A shell starts background jobs with some signals ignored; tests that send them must not depend on that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
