"""A real run whose batch size moves and settles, cut and resumed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from .runs import rows, train_quietly
from .tiny import config_for, write_model, write_tokenizer


@pytest.mark.slow
def test_a_real_run_explores_settles_and_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model", layers=1))
    settings = {
        "backpressure__enabled": True,
        "backpressure__warmup_steps": 8,
        "backpressure__max_batch_size": 8,
        "training__batch_size": 2,
        "training__max_tokens": 8,
        "training__save_every": 5,
        "data__source": "arithmetic",
        "reward__type": "custom",
        "reward__custom_module": "e2e.scores",
        "reward__custom_function": "score_length",
        "reward__workers": 1,
        "logging__log_dir": str(tmp_path / "logs"),
        "backend__adapter_path": str(tmp_path / "adapter"),
    }
    train_quietly(config_for(model, training__max_steps=10, **settings))
    train_quietly(config_for(model, training__max_steps=20, resume__from=str(tmp_path / "logs"), **settings))
    steps = rows(tmp_path / "logs")
    assert [row["step"] for row in steps] == list(range(20))
    assert [row["batch_size"] for row in steps[:9]] == [2, 1, 2, 4, 8, 1, 2, 4, steps[8]["batch_size"]]
    assert [row["bp_action"] for row in steps[:7]] == ["explore"] * 7
    for row, following in pairwise(steps[7:]):
        assert row["bp_action"] in ("hold", "increase", "throttle")
        grew = following["batch_size"] - row["batch_size"]
        assert {"hold": grew == 0, "increase": grew > 0, "throttle": grew < 0}[row["bp_action"]]
        assert 1 <= following["batch_size"] <= 8
        # The first step of a process is not measured, and it may have another size than the one before.
        assert row["bp_throughput"] is None or row["bp_throughput"] > 0
        assert row["bp_throughput"] is not None or row["step"] == 10
        assert 0 <= row["bp_sigma"] <= 1 and row["bp_kappa"] >= 0
    # Clocks are noisy here; that it hardly moves any more is enough.
    assert sum(row["bp_action"] == "hold" for row in steps[-10:]) >= 7
