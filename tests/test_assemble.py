"""Errors found while a run is assembled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.assemble import assemble
from retrain.config import load_config
from retrain.errors import ConfigError


def test_a_batch_that_repeats_its_few_examples_without_end_is_rejected(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "1+2=?", "answer": "3"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        None,
        {
            "model.model": "builtin:tiny",
            "backend.devices": "cpu",
            "data.source": "jsonl",
            "data.path": str(tmp_path / "two.jsonl"),
            "training.batch_size": 1_000_000,
            "training.max_tokens": 32,
            "logging.log_dir": str(tmp_path / "logs"),
            "reward.workers": 1,
        },
    )
    message = r"batch_size = 1000000 takes each of the 2 examples 500,000 times per step.  Try: batch_size = 2"
    with pytest.raises(ConfigError, match=message), assemble(config):
        pass
