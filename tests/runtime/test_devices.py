from __future__ import annotations

from pathlib import Path

import pytest

from retrain.runtime import devices


def test_the_memory_is_that_of_the_container_if_it_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "_MEMORY_LIMITS", (str(limit), str(tmp_path / "none")))
    physical = devices.machine_memory()
    assert physical > 1 << 28
    for text, wanted in (("max\n", physical), ("1000000\n", 1_000_000), (f"{1 << 62}\n", physical)):
        limit.write_text(text)
        assert devices.machine_memory() == wanted
    assert devices.cache_memory() == physical // 2
