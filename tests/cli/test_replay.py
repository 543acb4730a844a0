"""`retrain replay`: the row of all steps, and runs that were recorded in part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from retrain.analysis.replay import Difference, replay
from retrain.cli import run
from retrain.cli.replay import total
from retrain.config import TrainConfig, dump_config, load_config
from retrain.errors import ConfigError
from retrain.storage.recording import write_recording
from retrain.types import Completion, Example, Group, Score


def test_a_share_of_all_steps_is_one_of_their_absolute_advantage() -> None:
    first = Difference(0, 10, 1.0, 2.0, 1.0, 1, 0.5, 0.25)
    silent = Difference(1, 90, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
    last = Difference(2, 30, 1.0, 1.0, 0.5, 2, 0.1, 0.5)
    found = total([first, silent, last])
    assert (found.step, found.tokens, found.sign_flips) == (-1, 130, 3)
    assert (found.mean_before, found.mean_after) == pytest.approx((40 / 130, 50 / 130))
    assert found.changed == pytest.approx(25 / 130)
    # 5 of 10 and 3 of 30; 5 of 20 and 15 of 30.
    assert (found.planning_before, found.planning_after) == pytest.approx((8 / 40, 20 / 50))
    assert total([silent, silent]).planning_before == 0.0


def sepa_config(**options: object) -> TrainConfig:
    """Lambda is 0.5 at step 3, once a correct rate of 0.7 was seen."""
    sepa = {"sepa.steps": 4, "sepa.delay_steps": 1, "sepa.correct_rate_gate": 0.7}
    return load_config(None, {"model.model": "builtin:tiny", "algorithm.transform_mode": "gtpo_sepa"} | sepa | options)


def record_step_three(folder: Path, rows: list[dict[str, object]]) -> None:
    """A run whose third step is recorded, with one of two completions correct, and these metrics."""
    completions = tuple(
        Completion(np.array(ids), np.array(logprobs, dtype=np.float32), "", "stop")
        for ids, logprobs in (([5, 6, 7], [-0.1, -2.0, -0.5]), ([8, 9, 10], [-1.0, -0.2, -3.0]))
    )
    scores = (Score(1.0, "right"), Score(0.0, "wrong"))
    write_recording(folder, 3, [Group(Example("1+1", "2"), np.array([1, 2]), completions, scores)])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def replayed(folder: Path, wanted: TrainConfig) -> Difference:
    (found,) = replay(folder, sepa_config(), wanted)
    return found


def test_the_recorded_side_uses_the_lambda_that_the_run_logged(tmp_path: Path) -> None:
    record_step_three(tmp_path, [{"step": 3, "correct_rate": 0.5, "sepa_lambda": 0.5}])
    plain = sepa_config(**{"algorithm.transform_mode": "gtpo"})
    open_from_the_start = sepa_config(**{"sepa.correct_rate_gate": 0.0})
    assert replayed(tmp_path, plain).changed > 0.01
    assert replayed(tmp_path, open_from_the_start).changed == 0.0, "its lambda is 0.5, too"
    record_step_three(tmp_path, [{"step": 3, "correct_rate": 0.5}])
    assert replayed(tmp_path, plain).changed == 0.0, "without a logged lambda the gate is closed"


def test_steps_that_were_not_recorded_open_the_gate_of_both_sides(tmp_path: Path) -> None:
    before = [{"step": step, "correct_rate": rate} for step, rate in enumerate((0.2, 0.8, 0.4))]
    record_step_three(tmp_path, [*before, {"step": 3, "correct_rate": 0.5, "sepa_lambda": 0.5}])
    assert replayed(tmp_path, sepa_config()).changed == 0.0
    assert replayed(tmp_path, sepa_config(**{"sepa.correct_rate_gate": 0.9})).changed > 0.01


def test_a_run_whose_options_were_changed_by_force_is_replayed_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_step_three(tmp_path, [{"step": 3, "correct_rate": 0.5}])
    (tmp_path / "config.toml").write_text(dump_config(sepa_config()))
    changed = '[algorithm] advantage_mode: "grpo" -> "maxrl" at step 4'
    (tmp_path / "trainer_state.json").write_text(json.dumps({"status": "finished", "forced": [changed]}))
    assert run(["replay", str(tmp_path)]) == 0
    assert f"Note: --force-resume: {changed}. Earlier steps are computed" in capsys.readouterr().out


def test_an_edited_run_is_replayed_as_it_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_step_three(tmp_path, [{"step": 3, "correct_rate": 0.5}])
    (tmp_path / "config.toml").write_text(dump_config(sepa_config(**{"algorithm.advantage_mode": "grpo"})))
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    manifest = {"state": {"config": dump_config(sepa_config(**{"algorithm.advantage_mode": "maxrl"}))}}
    (tmp_path / "checkpoints" / "step_000004" / "checkpoint.json").write_text(json.dumps(manifest))
    state = {"status": "finished", "checkpoint": "checkpoints/step_000004"}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert run(["replay", str(tmp_path), "--hicra-alpha", "0.3"]) == 0
    printed = capsys.readouterr().out
    assert "maxrl+gtpo_sepa -> maxrl+gtpo_sepa" in printed
    assert '[algorithm] advantage_mode: "maxrl" -> "grpo"' in printed


def test_a_campaign_names_a_run_to_replay(tmp_path: Path) -> None:
    (tmp_path / "runs" / "grpo_s1").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a campaign; .*Try: retrain replay .*/runs/grpo_s1"):
        list(replay(tmp_path, sepa_config(), sepa_config()))
