from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
from pathlib import Path

import hypothesis
import pytest

# A busy machine can delay any example: time limits belong to pytest-timeout.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Triton reads this when it is first imported: where there is no GPU, its kernels are interpreted.
if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests say themselves when the Hub is to be out of reach.
os.environ.pop("HF_HUB_OFFLINE", None)


# Every HTTP client reads all certificates, which takes 40 ms; the servers of the tests have none.
ssl.create_default_context = functools.lru_cache(ssl.create_default_context)


# Environments that tests load, one of which is named like a test.
collect_ignore = ["environments/packages"]


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> None:
    """A shell starts background jobs with some signals ignored; tests that send them must not depend on that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it at each collection took a tenth of the suite's time."""
    gc.collect()
    gc.freeze()
