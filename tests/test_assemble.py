"""Errors found while a run is assembled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from retrain.assemble import assemble
from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigError, PluginError


def with_two_examples(folder: Path, batch_size: int, options: Mapping[str, object] | None = None) -> TrainConfig:
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "1+2=?", "answer": "3"}]
    (folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(
        None,
        {
            "model.model": "builtin:tiny",
            "backend.devices": "cpu",
            "data.source": "jsonl",
            "data.path": str(folder / "two.jsonl"),
            "training.batch_size": batch_size,
            "training.max_tokens": 32,
            "logging.log_dir": str(folder / "logs"),
            "reward.workers": 1,
            **(options or {}),
        },
    )


@pytest.mark.parametrize(("size", "notes"), [(2, 0), (3, 1)])
def test_a_batch_with_repeated_prompts_is_noted(
    size: int, notes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with assemble(with_two_examples(tmp_path, size)):
        pass
    note = f"Note: [training] batch_size = {size} repeats prompts within a step: there are only 2 examples."
    assert capsys.readouterr().out.count(note) == notes


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        ({"training.max_steps": 50}, True),
        ({"training.max_steps": 52}, False),
        ({"training.max_steps": 50, "sepa.schedule": "auto"}, False),
        ({"training.max_steps": 50, "algorithm.transform_mode": "gtpo"}, False),
    ],
)
def test_a_run_that_ends_before_sepa_begins_says_so(
    options: dict[str, object], is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with assemble(with_two_examples(tmp_path, 2, options)):
        pass
    note = "Note: SEPA stays off: it begins after [sepa] delay_steps = 50, and this run has 50 steps."
    assert (note in capsys.readouterr().out) == is_noted


@pytest.mark.parametrize(("warmup", "is_noted"), [(4.0, True), (3.0, False), (0.7, False), (0.0, False)])
def test_a_run_that_ends_before_its_warm_up_says_so(
    warmup: float, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with assemble(with_two_examples(tmp_path, 2, {"training.max_steps": 4, "optimizer.warmup_steps": warmup})):
        pass
    note = "Note: [optimizer] warmup_steps = 4 is not below 4 steps: the learning rate never reaches lr."
    assert (note in capsys.readouterr().out) == is_noted


def test_one_example_is_counted_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_two_examples(tmp_path, 2)
    (tmp_path / "two.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    with assemble(config):
        pass
    printed = capsys.readouterr().out
    assert "Loaded 1 example\n" in printed and "Pre-encoded 1 prompt\n" in printed
    assert "within a step: there is only 1 example." in printed


def test_prompts_that_are_cut_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = {"eval.every": 1, "eval.source": "jsonl", "eval.path": str(tmp_path / "held_out.jsonl")}
    config = with_two_examples(tmp_path, 2, {"training.max_prompt_tokens": 16, **held_out})
    long = '{"prompt": "1+1+1+1+1+1+1+1+1=?", "answer": "9"}\n'
    (tmp_path / "two.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n' + 2 * long)
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "2+1=?", "answer": "3"}\n' + long)
    with assemble(config):
        pass
    printed = capsys.readouterr().out
    assert "Note: of 3 prompts of [data], 2 cut to [training] max_prompt_tokens = 16.\n" in printed
    assert "Note: of 2 prompts of [eval], 1 cut to [training] max_prompt_tokens = 16.\n" in printed


def test_a_part_of_the_problems_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = {"eval.every": 1, "eval.source": "jsonl", "eval.path": str(tmp_path / "held_out.jsonl")}
    bounds = {"training.max_examples": 1, "eval.max_examples": 2}
    config = with_two_examples(tmp_path, 1, held_out | bounds)
    (tmp_path / "held_out.jsonl").write_text("".join(f'{{"prompt": "2+{n}=?", "answer": "0"}}\n' for n in range(9)))
    with assemble(config):
        pass
    printed = capsys.readouterr().out
    assert "Loaded 1 example (the first of 2)\n" in printed
    assert "Evaluating 2 of 9 held-out problems ([eval] max_examples), the same in every run\n" in printed


def test_prompts_of_teaching_that_are_cut_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teaching = {"teaching.enabled": True, "teaching.max_probe_tokens": 8, "algorithm.advantage_mode": "grpo"}
    for most in (0, 24):
        with assemble(with_two_examples(tmp_path, 2, teaching | {"training.max_prompt_tokens": most})):
            pass
        printed = capsys.readouterr().out
        cut = re.search(
            r"Note: \[teaching\] the teacher reads up to \d+ tokens, and max_prompt_tokens = 24 keeps", printed
        )
        assert bool(cut) == bool(most) and "prompts of [data]" not in printed


def test_a_batch_that_repeats_its_few_examples_without_end_is_rejected(tmp_path: Path) -> None:
    config = with_two_examples(tmp_path, 1_000_000)
    message = r"batch_size = 1000000 takes each of the 2 examples 500,000 times per step.  Try: batch_size = 2"
    with pytest.raises(ConfigError, match=message), assemble(config):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"loss.type": "late_parts.missing"},
        {"planning.detector": "late_parts.Detector", "algorithm.transform_mode": "gtpo_hicra"},
    ],
)
def test_a_plugin_that_cannot_be_built_ends_the_run_before_anything_is_loaded(
    options: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_parts.py").write_text("class Detector:\n    @classmethod\n    def from_config(cls): pass\n")
    with pytest.raises(PluginError, match="late_parts"), assemble(with_two_examples(tmp_path, 2, options)):
        pass
    assert "Loading" not in capsys.readouterr().out
