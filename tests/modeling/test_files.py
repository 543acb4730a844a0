from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from retrain.builtin import resolve_model
from retrain.modeling.files import find_damaged_files, find_model, suggest_restoring

WHOLE = (Path(resolve_model("builtin:tiny")) / "model.safetensors").read_bytes()
NO_HEADER = "has no valid header: it is truncated, or not a safetensors file"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (WHOLE, ""),
        (WHOLE[:-1], f"is truncated: its header says {len(WHOLE):,} bytes, it has {len(WHOLE) - 1:,}"),
        (WHOLE + b"0", f"is damaged: its header says {len(WHOLE):,} bytes, it has {len(WHOLE) + 1:,}"),
        (WHOLE[:100], NO_HEADER),
        (b"version https://git-lfs.github.com/spec/v1", NO_HEADER),
        (b"", NO_HEADER),
        ((2).to_bytes(8, "little") + b"[]", NO_HEADER),
        ((7).to_bytes(8, "little") + b'{"a":1}', NO_HEADER),
    ],
)
def test_a_file_of_weights_has_the_size_that_its_header_says(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "unread.safetensors").write_bytes(b"")
    expected = [f"model.safetensors {problem}"] if problem else []
    assert find_damaged_files(find_model(str(tmp_path))) == expected


def test_every_shard_that_the_index_names_is_looked_at(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "lacking.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(WHOLE)
    (tmp_path / "two.safetensors").write_bytes(WHOLE[:-1])
    (found,) = find_damaged_files(find_model(str(tmp_path)))
    assert found.startswith("two.safetensors is truncated")


def test_a_damaged_file_in_the_cache_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "models--some--model" / "snapshots" / "main")
    files = find_model("some/model")
    assert not find_damaged_files(files)
    (tmp_path / "models--some--model" / "snapshots" / "main" / "model.safetensors").write_bytes(WHOLE[:-1])
    assert find_damaged_files(files)
    # Without the flag, the file in the cache would be kept.
    assert suggest_restoring(files) == "Try: hf download some/model --force-download"


def test_of_several_cached_versions_the_one_that_is_loaded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    for age, name in enumerate(("newest", "older", "oldest")):
        folder = cached / "snapshots" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(WHOLE)
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert find_model("some/model").folder == cached / "snapshots" / "newest"
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("older")
    assert find_model("some/model").folder == cached / "snapshots" / "older"
