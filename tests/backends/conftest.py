from __future__ import annotations

from pathlib import Path

import pytest
from e2e.tiny import write_model, write_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 of some ten thousand weights and its tokenizer."""
    return write_tokenizer(write_model(tmp_path_factory.mktemp("tiny")))
