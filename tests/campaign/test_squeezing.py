"""A campaign with a [squeeze] table analyses the adapter of its first run."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from squeeze.adapters import random_factors, write_adapter

from retrain.campaign.plan import Run
from retrain.campaign.squeezing import FirstRunAnalysis, adapter_of, check_analysis
from retrain.cli.explain import find_blockers
from retrain.cli.trial import start_trials
from retrain.errors import ConfigError

from .campaigns import GRPO, MAXRL, FakeExecutor, campaign_config, manifest_of, planned, rate_by_seed, run_with

Captured = pytest.CaptureFixture[str]


def with_adapter(run: Run) -> float:
    write_adapter(run.folder / "adapter", random_factors(8), rank=8)
    return rate_by_seed(run)


def test_the_table_is_printed_once_and_the_rank_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    tables = {"squeeze": {"min_variance_retention": 0.9, "output_path": str(tmp_path / "small")}}
    config = campaign_config(tmp_path / "c", tables | {"model": {"lora_rank": 8}})
    assert run_with(FakeExecutor(with_adapter), config, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed.count("Mean Var%") == 1
    assert "LoRA-Squeeze of grpo+none_s1:" in printed
    found = manifest_of(tmp_path / "c")["squeeze"]
    assert found["run"] == "grpo+none_s1"
    assert found["source_rank"] == 8
    assert 1 <= found["recommended_rank"] <= 8
    assert [row["rank"] for row in found["ranks"]] == [1, 2, 4, 8]
    assert found["ranks"][-1]["mean"] == pytest.approx(1.0)
    assert (tmp_path / "small" / "adapter_config.json").exists()
    again = FakeExecutor(with_adapter, codes={"maxrl+none_s2": 1})
    run_with(again, config, monkeypatch)
    assert "Mean Var%" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"output_path": "thesis"}, "is not an adapter and is not overwritten"),
        ({"output_path": "thesis/notes.txt/small"}, "notes.txt cannot be written to"),
        ({"output_path": "small", "compress_to": 16}, "compress_to = 16 is outside the adapter's rank, 1 to 8"),
        ({"source_rank": 4}, "source_rank = 4, but the adapter has rank 8"),
    ],
)
def test_an_analysis_that_would_fail_is_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, object], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "notes.txt").write_text("mine")
    config = campaign_config(tmp_path / "c", {"squeeze": table, "model": {"lora_rank": 8}})
    with pytest.raises(ConfigError, match=problem):
        run_with(FakeExecutor(with_adapter), config, monkeypatch)
    assert not (tmp_path / "c").exists()
    assert any(problem in blocker for blocker in find_blockers(config, "a.toml"))
    with start_trials(config) as wait:
        assert any(trial.where == "[squeeze]" and problem in trial.problem for trial in wait())


def test_ranks_that_one_of_the_conditions_has_are_not_refused(tmp_path: Path) -> None:
    conditions = [{**GRPO, "lora_rank": 4}, {**MAXRL, "lora_rank": 8}]
    config = campaign_config(tmp_path / "c", {"squeeze": {"source_rank": 4}}, seeds=[1], conditions=conditions)
    check_analysis(config, planned(config), tmp_path / "c")


def test_a_campaign_whose_analysis_is_done_needs_no_folder_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"squeeze": {"output_path": str(tmp_path / "small")}, "model": {"lora_rank": 8}}
    config = campaign_config(tmp_path / "c", tables, seeds=[1])
    run_with(FakeExecutor(with_adapter), config, monkeypatch)
    (tmp_path / "small" / ".retrain_published.json").unlink()
    assert run_with(FakeExecutor(with_adapter), campaign_config(tmp_path / "c", tables), monkeypatch) == 0
    longer = campaign_config(tmp_path / "c", tables, max_steps=6)
    with pytest.raises(ConfigError, match="without retrain's record of a compression"):
        run_with(FakeExecutor(with_adapter), longer, monkeypatch)


def test_an_analysis_that_was_interrupted_is_done_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config = campaign_config(tmp_path / "c", {"squeeze": {}, "model": {"lora_rank": 8}}, seeds=[1], conditions=[GRPO])
    begun, release = threading.Event(), threading.Event()
    analyze = FirstRunAnalysis._work

    def wait(self: FirstRunAnalysis, run: Run) -> None:
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()

    monkeypatch.setattr(FirstRunAnalysis, "_work", wait)
    assert run_with(FakeExecutor(with_adapter), config, monkeypatch) == 130
    release.set()
    printed = capsys.readouterr().out
    assert begun.is_set() and "Done" not in printed
    assert printed.splitlines()[-2:] == [
        "The LoRA rank analysis is not finished; a resume begins it again.",
        f"To resume: retrain --resume {tmp_path / 'c'}",
    ]
    assert manifest_of(tmp_path / "c")["status"] == "interrupted"
    monkeypatch.setattr(FirstRunAnalysis, "_work", analyze)
    executor = FakeExecutor(with_adapter)
    assert run_with(executor, config, monkeypatch) == 0
    assert executor.started == []
    assert manifest_of(tmp_path / "c")["squeeze"]["run"] == "grpo+none_s1"
    assert capsys.readouterr().out.count("Mean Var%") == 1


def test_a_resume_analyses_the_first_run_that_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = campaign_config(tmp_path, {"model": {"lora_rank": 8}})
    run_with(FakeExecutor(with_adapter, codes={"grpo+none_s1": 1}), config, monkeypatch)
    config = campaign_config(tmp_path, {"squeeze": {}, "model": {"lora_rank": 8}})
    assert run_with(FakeExecutor(with_adapter), config, monkeypatch) == 0
    assert manifest_of(tmp_path)["squeeze"]["run"] == "maxrl+none_s1"


@pytest.mark.slow
def test_a_run_that_is_extended_is_analysed_again_once_it_has_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def with_growing_adapter(run: Run) -> float:
        write_adapter(run.folder / "adapter", random_factors(run.max_steps), rank=run.max_steps)
        return rate_by_seed(run)

    for steps, analyses in ((4, 1), (6, 1), (6, 0)):
        config = campaign_config(tmp_path, {"squeeze": {}, "model": {"lora_rank": 8}}, max_steps=steps)
        assert run_with(FakeExecutor(with_growing_adapter), config, monkeypatch) == 0
        assert capsys.readouterr().out.count("Mean Var%") == analyses
        found = manifest_of(tmp_path)["squeeze"]
        assert (found["run"], found["steps"], found["source_rank"]) == ("grpo+none_s1", steps, steps)


@pytest.mark.slow
def test_runs_without_an_adapter_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    conditions = [GRPO | {"lora_rank": 0}, MAXRL | {"lora_rank": 8}]
    config = campaign_config(tmp_path / "c", {"squeeze": {}}, conditions=conditions)
    # A session without the table, then one with it, which looks for a finished run.
    assert run_with(FakeExecutor(with_adapter), config.model_copy(update={"squeeze": None}), monkeypatch) == 0
    for again in (config, campaign_config(tmp_path / "d", {"squeeze": {}}, conditions=conditions)):
        assert run_with(FakeExecutor(with_adapter), again, monkeypatch) == 0
        printed = capsys.readouterr().out
        assert "The analysis failed" not in printed and "not used" not in printed
        assert manifest_of(Path(again.logging.log_dir))["squeeze"]["run"].startswith("maxrl+none")


def test_a_campaign_without_adapters_says_that_none_is_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config = campaign_config(tmp_path, {"squeeze": {}, "model": {"lora_rank": 0}})
    assert run_with(FakeExecutor(), config, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "Note: [squeeze] is not used: no run trains an adapter." in printed
    assert "LoRA-Squeeze" not in printed


def test_an_adapter_that_cannot_be_analysed_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config = campaign_config(tmp_path, {"squeeze": {}})
    assert run_with(FakeExecutor(), config, monkeypatch) == 0
    assert "The analysis failed" in capsys.readouterr().out
    assert "squeeze" not in manifest_of(tmp_path)


def test_the_analysis_goes_to_wandb_and_a_failure_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    sent = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("retrain.tracking.wandb.log_squeeze", lambda config, folder, found: sent.append(found))
    tables = {"squeeze": {}, "logging": {"wandb_project": "tests"}}
    run_with(FakeExecutor(with_adapter), campaign_config(tmp_path / "a", tables), monkeypatch)
    assert [found["run"] for found in sent] == ["grpo+none_s1"]

    def fail(*given: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("retrain.tracking.wandb.log_squeeze", fail)
    config = campaign_config(tmp_path / "b", tables)
    assert run_with(FakeExecutor(with_adapter), config, monkeypatch) == 0
    assert "Warning: logging the analysis to wandb failed: no network" in capsys.readouterr().out
    assert manifest_of(tmp_path / "b")["squeeze"]["source_rank"] == 8


def test_the_adapter_of_a_run_on_tinker_is_where_its_state_says(tmp_path: Path) -> None:
    tinker, local = planned(campaign_config(tmp_path))[:2]
    for run, state in ((tinker, {"adapter": "tinker://run-0/weights/last"}), (local, {})):
        run.folder.mkdir(parents=True)
        (run.folder / "trainer_state.json").write_text(json.dumps(state))
    assert adapter_of(tinker) == "tinker://run-0/weights/last"
    assert adapter_of(local) == str(local.folder / "adapter")
