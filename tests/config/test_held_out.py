"""Which problems an evaluation is given, by what [eval] and [data] say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrain.config import build_config
from retrain.data import load_held_out
from retrain.errors import ConfigError


@pytest.mark.parametrize("source", ["", "jsonl"])
def test_evaluation_reads_the_held_out_file(tmp_path: Path, source: str) -> None:
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": "1"}))
    tables: dict[str, Any] = {
        "data": {"source": "jsonl", "path": str(tmp_path / "train.jsonl")},
        "eval": {"every": 1, "source": source, "path": str(tmp_path / "held_out.jsonl")},
    }
    held_out = load_held_out(build_config(tables, {}, "run.toml"))
    assert [example.prompt for example in held_out] == ["held_out"]


@pytest.mark.parametrize(
    "data",
    [
        {"source": "jsonl", "path": "problems.jsonl"},
        {"source": "jsonl"},
        {"source": "arithmetic", "split": "test"},
    ],
)
def test_an_environment_is_evaluated_whatever_the_unused_data_table_says(data: dict[str, Any]) -> None:
    environment = {"provider": "builtin", "id": "guess-number"}
    tables: dict[str, Any] = {"data": data, "environment": environment, "eval": {"every": 1, "split": "test"}}
    assert build_config(tables, {}, "run.toml").eval.every == 1
    tables["eval"]["split"] = "train"
    with pytest.raises(
        ConfigError, match=r"\[eval\] split = \"train\" holds the problems that the environment trains on"
    ):
        build_config(tables, {}, "run.toml")


def test_a_link_to_the_training_file_is_the_training_file(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "train.jsonl")
    tables: dict[str, Any] = {
        "data": {"source": "jsonl", "path": str(tmp_path / "train.jsonl")},
        "eval": {"every": 1, "path": str(tmp_path / "link.jsonl")},
    }
    with pytest.raises(ConfigError, match=r"\[eval\] path is the file of \[data\] path"):
        build_config(tables, {}, "run.toml")
