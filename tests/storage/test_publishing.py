"""Publishing a folder of weights."""

from __future__ import annotations

import os
from pathlib import Path

from retrain.storage.publishing import publish_folder


def publish(target: Path, text: str) -> None:
    def fill(draft: Path) -> None:
        (draft / "README.md").write_text("blank")
        (draft / "weights").write_text(text)

    publish_folder(target, fill)


def test_a_card_that_was_written_since_stays(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    publish(adapter, "1")
    publish(adapter, "2")
    assert (adapter / "weights").read_text() == "2"
    (adapter / "README.md").write_text("filled in")
    later = (adapter / ".retrain_published.json").stat().st_mtime_ns + 1_000_000
    os.utime(adapter / "README.md", ns=(later, later))
    for text in ("3", "4"):
        publish(adapter, text)
        assert (adapter / "README.md").read_text() == "filled in"
        assert (adapter / "weights").read_text() == text
