from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from folders import write_campaign, write_run

from retrain.cli import run


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["diff", *map(str, arguments), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_two_runs_part_at_the_first_step_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [0.1, 0.2, 0.3, 0.4])
    b = write_run(tmp_path / "b", [0.1, 0.2, 0.5, 0.41, 0.9], training__lr=1e-3, training__seed=7)
    data = as_json(capsys, a, b)
    metrics = {row["metric"]: row for row in data["metrics"]}
    assert metrics["correct_rate"]["first_step"] == 2
    assert (metrics["correct_rate"]["a"], metrics["correct_rate"]["b"]) == (0.4, 0.41)
    assert metrics["correct_rate"]["largest"] == pytest.approx(0.2)
    assert metrics["correct_rate"]["largest_step"] == 2
    assert metrics["condition"]["first_step"] is None
    assert data["steps"] == {"a": 4, "b": 5, "shared": 4, "last_shared": 3}
    assert data["config"]["training.lr"] == {"a": 4e-5, "b": 1e-3}
    assert data["config"]["training.seed"] == {"a": 42, "b": 7}
    tolerant = {row["metric"]: row for row in as_json(capsys, a, b, "--tolerance", "0.5")["metrics"]}
    assert tolerant["correct_rate"]["first_step"] is None
    assert run(["diff", str(a), str(b), "--tolerance", "nan"]) == 2


def test_the_evaluation_after_the_last_step_is_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [write_run(tmp_path / name, [0.1, 0.2]) for name in "ab"]
    for side in sides:
        (side / "eval.jsonl").write_text(json.dumps({"step": 2, "eval_pass_at_1": 0.5, "problems": "a"}) + "\n")
    assert as_json(capsys, *sides)["steps"] == {"a": 2, "b": 2, "shared": 2, "last_shared": 1}


def test_values_are_labelled_with_their_own_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [0.1, 0.2, 0.3, 0.4], {4: [0, 0]})
    b = write_run(tmp_path / "b", [0.1, 0.2, 0.3, 0.5], {4: [1, 0]})
    rows = {row["metric"]: row for row in as_json(capsys, a, b)["metrics"]}
    assert (rows["correct_rate"]["step"], rows["eval_pass_at_1"]["step"]) == (3, 4)
    assert run(["diff", str(a), str(b)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "eval_pass_at_1 step 4 step 4 0 0.5 0.5 at step 4" in lines
    assert "correct_rate step 3 step 3 0.4 0.5 0.1 at step 3" in lines


def test_edited_inputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_run(tmp_path / name, [0.1]) for name in "ab")
    for side, digest in ((a, "1"), (b, "2")):
        state = {"status": "finished", "code": {"mine": digest, "other": "1"}, "data": digest}
        (side / "trainer_state.json").write_text(json.dumps(state))
    assert as_json(capsys, a, b)["inputs"] == ["the code of mine", "the training data"]
    assert as_json(capsys, a, a)["inputs"] == []
    for side, problems in ((a, "1"), (b, "2")):
        row = {"step": 1, "eval_pass_at_1": 0.5, "problems": problems}
        (side / "eval.jsonl").write_text(json.dumps(row) + "\n")
    assert as_json(capsys, a, b)["inputs"][-1] == "the held-out problems"
    assert run(["diff", str(a), str(b)]) == 0
    assert "\nEdited between the runs: the code of mine.\n" in capsys.readouterr().out


def test_texts_part_and_have_no_largest_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [0.1]), write_run(tmp_path / "b", [0.1], algorithm__advantage_mode="maxrl")
    (row,) = [row for row in as_json(capsys, a, b)["metrics"] if row["metric"] == "condition"]
    names = {"a": "grpo+none", "b": "maxrl+none", "largest": None, "largest_step": None}
    assert row == {"metric": "condition", "first_step": 0, "step": 0, **names}
    c, d = (write_run(tmp_path / name, [0.1, 0.2]) for name in "cd")
    rows = [json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()]
    rows[1]["condition"] = "maxrl+none"
    (d / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = [row for row in as_json(capsys, c, d)["metrics"] if row["metric"] == "condition"]
    assert row == {"metric": "condition", "first_step": 1, "step": 1, **names}


def test_conditions_are_means_over_shared_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"grpo+none": {1: [0, 1], 2: [1, 1], 9: [0, 0]}, "maxrl+none": {1: [1, 1], 2: [1, 1]}}
    folder = write_campaign(tmp_path / "c", scores)
    data = as_json(capsys, folder / "grpo+none", folder / "maxrl+none")
    assert data["seeds"] == [1, 2]
    rows = {row["metric"]: row for row in data["metrics"]}
    assert (rows["eval_pass_at_1"]["a"], rows["eval_pass_at_1"]["b"]) == (0.75, 1.0)
    assert set(data["config"]) == {"algorithm.advantage_mode"}


def test_the_screen_names_options_metrics_and_what_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [0.1, 0.2]), write_run(tmp_path / "b", [0.1, 0.3], training__lr=1e-3)
    assert run(["diff", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "training.lr" in text and "correct_rate" in text and "step 1" in text
    assert "Equal at every step: condition.\nTimes are not compared" in text
    assert run(["diff", str(a), str(a)]) == 0
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (("a", "nowhere"), "there is no folder"),
        (("c", "a"), "contains several conditions"),
        (("c/x+y", "a"), "has no condition 'x+y'"),
        (("c/grpo+none", "a"), "no seed in common"),
        (("a", "empty"), "no step in common"),
    ],
)
def test_what_cannot_be_compared_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: tuple[str, str], message: str
) -> None:
    write_run(tmp_path / "a", [0.1])
    write_run(tmp_path / "empty", [])
    write_campaign(tmp_path / "c", {"grpo+none": {1: [1], 2: [1]}, "maxrl+none": {1: [1]}})
    assert run(["diff", *(str(tmp_path / side) for side in sides)]) == 2
    assert message in capsys.readouterr().err


def test_dates_in_a_table_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = []
    for day in (1, 2):
        environment = {
            "environment__provider": "builtin",
            "environment__id": "calculator",
            "environment__args": {"since": date(2026, 1, day)},
        }
        sides.append(write_run(tmp_path / f"{day}", [0.1], **environment))
    found = as_json(capsys, *sides)["config"]["environment.args"]
    assert found == {"a": {"since": "2026-01-01"}, "b": {"since": "2026-01-02"}}
