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


def test_a_card_that_was_written_since_is_set_aside(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    publish(adapter, "1")
    publish(adapter, "2")
    assert sorted(path.name for path in adapter.iterdir()) == [".retrain_published.json", "README.md", "weights"]
    for number, text in enumerate(("of 2", "of 3"), start=1):
        (adapter / "README.md").write_text(text)
        later = (adapter / ".retrain_published.json").stat().st_mtime_ns + 1_000_000
        os.utime(adapter / "README.md", ns=(later, later))
        for weights in (f"{number}a", f"{number}b"):
            publish(adapter, weights)
            assert (adapter / "README.md").read_text() == "blank"
            assert (adapter / f"README.{number}.md").read_text() == text
            assert (adapter / "weights").read_text() == weights
    assert not (adapter / "README.3.md").exists()
