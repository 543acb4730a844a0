from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.steps import VARIANTS, check_steps
from tests.e2e.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), gain=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"distributed__fsdp": True}], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_the_steps_of_a_single_process(
    model: Path, tmp_path: Path, world: int, more: dict[str, Any]
) -> None:
    check_steps(world, model, tmp_path, more, list(VARIANTS))
