from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.tiny import write_model, write_tokenizer


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("tiny")))
