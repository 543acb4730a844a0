"""The campaign of examples/, with fewer seeds and steps: real training, one model, and all that follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign.plan import plan_runs
from retrain.cli import run
from retrain.config import load_config

from .campaigns import manifest_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "campaign.toml"


def test_the_example_is_two_conditions_with_five_seeds() -> None:
    runs = plan_runs(load_config(EXAMPLE), Path("c"), "campaign.toml")
    assert len(runs) == 10
    assert len({run.condition for run in runs}) == 2


@pytest.mark.slow
def test_the_example_runs_with_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--campaign-max-steps", "1", "--campaign.seeds", "[1, 2]", "--batch-size", "2", "--group-size", "4"]
    assert run([str(EXAMPLE), "--log-dir", "c", "--eval-max-examples", "8", *flags]) == 0
    printed = capsys.readouterr().out
    assert "eval_pass_at_1 at step 1, paired by seed:" in printed
    table = manifest_of(tmp_path / "c")
    assert table["status"] == "finished"
    assert [record["status"] for record in table["runs"]] == 4 * ["finished"]
    assert all(record["evaluation"]["eval_pass_at_1"] is not None for record in table["runs"])
    assert "Mean Var%" in printed or "could not be analysed" in printed
