"""How hard generated tests try: a sixteenth as many examples in the quick suite as in `make test-slow`."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("RETRAIN_FUZZ") == "full"


def examples(number: int) -> int:
    """So many, or a sixteenth of them."""
    return number if IS_FULL else max(number // 16, 5)
