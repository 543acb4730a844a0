"""The scheduler over an executor that only pretends; processes are in test_processes.py."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cases import slow

from retrain.builtin import resolve_model
from retrain.campaign.earlier import choose_folder
from retrain.campaign.plan import Run
from retrain.campaign.processes import RunExit
from retrain.cli import run as cli
from retrain.config import dump_config, load_config
from retrain.data import ExampleOrder, load_examples
from retrain.errors import CheckpointError, ConfigError, RetrainError
from retrain.storage.checkpoint import Checkpoints

from .campaigns import (
    GRPO,
    MAXRL,
    TESTS,
    FakeExecutor,
    campaign_config,
    manifest_of,
    planned,
    rate_by_seed,
    run_with,
    statuses,
    write_result,
)

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


def test_a_campaign_inside_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_with(FakeExecutor(), campaign_config(tmp_path / "logs" / "c"), monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "Campaign of 4 runs in logs/c; " in printed
    assert "Done: 4 runs in logs/c.\nTo view it: retrain ui logs/c\n" in printed


def test_a_campaign_runs_one_after_the_other(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    executor = FakeExecutor()
    assert run_with(executor, campaign_config(tmp_path), monkeypatch) == 0
    assert executor.started == ["grpo+none_s1", "maxrl+none_s1", "grpo+none_s2", "maxrl+none_s2"]
    assert executor.most == 1
    assert set(statuses(tmp_path).values()) == {"finished"}
    assert executor.calls[-1] == "close"
    printed = capsys.readouterr().out
    assert "maxrl+none_s2: finished at step 4" in printed
    assert "Done: 4 runs" in printed


@pytest.mark.parametrize(("workers", "most"), [(0, 4), (2, 2), (99, 4)])
def test_parallel_runs_are_as_many_as_workers_and_none_named_means_all(
    tmp_path: Path, monkeypatch: Patch, workers: int, most: int
) -> None:
    executor = FakeExecutor()
    assert run_with(executor, campaign_config(tmp_path, parallel=True, max_workers=workers), monkeypatch) == 0
    assert executor.most == most


def test_parallel_starts_are_staggered(tmp_path: Path, monkeypatch: Patch) -> None:
    executor, starts = FakeExecutor(), []
    start = executor.start
    monkeypatch.setattr(executor, "start", lambda run: (starts.append(time.monotonic()), start(run)))
    run_with(executor, campaign_config(tmp_path, parallel=True, stagger_seconds=0.05), monkeypatch)
    assert all(later - earlier >= 0.05 for earlier, later in pairwise(starts))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    executor = FakeExecutor(codes={"maxrl+none_s1": 1, "grpo+none_s2": -11})
    assert run_with(executor, campaign_config(tmp_path), monkeypatch) == 1
    assert statuses(tmp_path) == {
        "grpo+none_s1": "finished",
        "maxrl+none_s1": "failed",
        "grpo+none_s2": "failed",
        "maxrl+none_s2": "finished",
    }
    record = manifest_of(tmp_path)["runs"][2]
    assert (record["exit_code"], record["error"], record["step"]) == (-11, "it broke", 2)
    printed = capsys.readouterr().out
    assert "2 of 4 runs failed: maxrl+none_s1, grpo+none_s2." in printed
    assert f"To resume: retrain --resume {tmp_path}" in printed
    assert manifest_of(tmp_path)["status"] == "failed"


def test_a_run_that_is_killed_without_a_word_says_how_it_ended(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    class Silent(FakeExecutor):
        def _end(self, run: Run) -> RunExit:
            return replace(super()._end(run), error="")

    executor = Silent(codes={"maxrl+none_s1": -9})
    assert run_with(executor, campaign_config(tmp_path), monkeypatch) == 1
    assert "  It was ended by signal 9.\n" in capsys.readouterr().out
    assert cli(["status", str(tmp_path)]) == 0
    assert "maxrl+none_s1 failed: It was ended by signal 9." in capsys.readouterr().out


def test_a_run_that_is_killed_after_its_end_is_finished(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    class KilledAtTheEnd(FakeExecutor):
        def _end(self, run: Run) -> RunExit:
            return replace(super()._end(run), exit_code=-9)

    assert run_with(KilledAtTheEnd(), campaign_config(tmp_path), monkeypatch) == 0
    assert set(statuses(tmp_path).values()) == {"finished"}
    assert "failed" not in capsys.readouterr().out


def test_the_summary_names_the_runs_that_it_leaves_out(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    executor = FakeExecutor(codes={"maxrl+none_s3": 1})
    assert run_with(executor, campaign_config(tmp_path, seeds=[1, 2, 3]), monkeypatch) == 1
    assert "Not finished, and left out: maxrl+none_s3." in capsys.readouterr().out


def test_a_second_start_runs_only_what_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    config = campaign_config(tmp_path)
    run_with(FakeExecutor(codes={"maxrl+none_s1": 1}), config, monkeypatch)
    again = FakeExecutor()
    assert run_with(again, config, monkeypatch) == 0
    assert again.started == ["maxrl+none_s1"]
    records = {record["name"]: record for record in manifest_of(tmp_path)["runs"]}
    assert {name: record["attempts"] for name, record in records.items()} == {
        "grpo+none_s1": 1,
        "maxrl+none_s1": 2,
        "grpo+none_s2": 1,
        "maxrl+none_s2": 1,
    }
    assert manifest_of(tmp_path)["status"] == "finished"
    assert len(manifest_of(tmp_path)["sessions"]) == 2
    nothing = FakeExecutor()
    assert run_with(nothing, config, monkeypatch) == 0
    assert nothing.started == []


def test_more_seeds_conditions_and_steps_can_be_added(tmp_path: Path, monkeypatch: Patch) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path, seeds=[1]), monkeypatch)
    more = FakeExecutor()
    run_with(more, campaign_config(tmp_path, seeds=[1, 2]), monkeypatch)
    assert more.started == ["grpo+none_s2", "maxrl+none_s2"]
    longer = FakeExecutor()
    run_with(longer, campaign_config(tmp_path, seeds=[1], max_steps=6), monkeypatch)
    assert longer.started == ["grpo+none_s1", "maxrl+none_s1"]
    assert len(manifest_of(tmp_path)["runs"]) == 4


@pytest.mark.parametrize("is_resumed", [False, True])
def test_fewer_steps_than_a_run_has_taken_are_refused(tmp_path: Path, monkeypatch: Patch, is_resumed: bool) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path, seeds=[1]), monkeypatch)
    before = (tmp_path / "config.toml").read_text()
    tables = {"resume": {"from": str(tmp_path)}} if is_resumed else {}
    shorter = campaign_config(tmp_path, tables, seeds=[1], max_steps=3)
    with pytest.raises(ConfigError, match=r"max_steps = 3 is less than the 4 steps that grpo\+none_s1 has taken\."):
        run_with(FakeExecutor(), shorter, monkeypatch)
    assert (tmp_path / "config.toml").read_text() == before


def test_another_campaign_does_not_replace_the_one_in_its_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path, seeds=[1]), monkeypatch)
    before = {name: (tmp_path / name).read_text() for name in ("manifest.json", "config.toml")}
    other = {"advantage_mode": "maxrl", "transform_mode": "gtpo"}
    joined = FakeExecutor()
    with pytest.raises(ConfigError, match=r"holds another campaign, .* lacks: maxrl\+none\.  Try: another --log-dir"):
        run_with(joined, campaign_config(tmp_path, seeds=[1], conditions=[GRPO, other]), monkeypatch)
    assert joined.started == []
    assert {name: (tmp_path / name).read_text() for name in before} == before
    resumed = campaign_config(tmp_path, {"resume": {"from": str(tmp_path)}}, seeds=[1], conditions=[GRPO, other])
    assert run_with(joined, resumed, monkeypatch) == 0
    assert joined.started == ["maxrl+gtpo_s1"]
    assert set(statuses(tmp_path)) == {"grpo+none_s1", "maxrl+none_s1", "maxrl+gtpo_s1"}


def test_a_resume_names_the_finished_runs_that_the_file_no_longer_has(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch)
    line = "Finished runs that the configuration lacks stay in the folder and in comparisons: "
    assert line not in capsys.readouterr().out
    run_with(FakeExecutor(), campaign_config(tmp_path, {"resume": {"from": str(tmp_path)}}, seeds=[1, 3]), monkeypatch)
    assert f"{line}grpo+none_s2, maxrl+none_s2.\n" in capsys.readouterr().out


def test_a_campaign_with_fewer_seeds_does_not_replace_one_with_open_runs(tmp_path: Path, monkeypatch: Patch) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path, seeds=[1, 2]), monkeypatch)
    manifest = manifest_of(tmp_path)
    next(run for run in manifest["runs"] if run["name"] == "grpo+none_s2")["status"] = "interrupted"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    before = (tmp_path / "config.toml").read_text()
    for resume in ({}, {"resume": {"from": str(tmp_path)}}):
        fewer = FakeExecutor()
        with pytest.raises(ConfigError, match=r"holds another campaign, .* lacks: grpo\+none_s2\.  Try: another"):
            run_with(fewer, campaign_config(tmp_path, resume, seeds=[1]), monkeypatch)
        assert fewer.started == []
        assert (tmp_path / "config.toml").read_text() == before


def test_a_run_that_ended_while_nobody_looked_is_taken_over(tmp_path: Path, monkeypatch: Patch) -> None:
    config = campaign_config(tmp_path)
    write_result(planned(config)[0], 0.7)
    executor = FakeExecutor()
    run_with(executor, config, monkeypatch)
    assert "grpo+none_s1" not in executor.started
    record = manifest_of(tmp_path)["runs"][0]
    assert (record["status"], record["final"]["correct_rate"]) == ("finished", 0.7)


def test_the_manifest_says_what_was_run_with_what(tmp_path: Path, monkeypatch: Patch) -> None:
    config = campaign_config(tmp_path, conditions=[GRPO, MAXRL | {"lr": 1e-3}])
    run_with(FakeExecutor(), config, monkeypatch)
    table = manifest_of(tmp_path)
    assert table["format"] == 1
    assert table["seeds"] == [1, 2]
    assert table["conditions"] == [
        {"name": "grpo+none", "overrides": GRPO},
        {"name": "maxrl+none_lr=0.001", "overrides": MAXRL | {"lr": 1e-3}},
    ]
    assert table["config"]["campaign"]["max_steps"] == 4
    assert {"python", "retrain", "torch", "transformers", "peft"} <= table["versions"].keys()
    assert re.fullmatch("[0-9a-f]{40}", table["git"]["commit"])
    assert table["git"]["dirty"] in (True, False)
    record = table["runs"][0]
    assert (record["condition"], record["seed"], record["folder"]) == ("grpo+none", 1, "runs/grpo+none_s1")
    assert (record["step"], record["max_steps"], record["exit_code"]) == (4, 4, 0)
    assert record["final"]["correct_rate"] == 0.501
    assert record["started"] <= record["ended"]
    assert record["seconds"] >= 0
    assert not (tmp_path / ".manifest.json").exists()
    # The campaign can be resumed without its file.
    assert load_config(tmp_path / "config.toml").campaign == config.campaign


def test_conditions_may_have_dates(tmp_path: Path, monkeypatch: Patch) -> None:
    # TOML has dates, JSON has none.
    since = [
        {"environment": {"provider": "builtin", "id": "calculator", "args": {"since": date(2026, 1, day)}}}
        for day in (1, 2)
    ]
    config = campaign_config(tmp_path, {"reward": {"type": "match", "custom_module": ""}}, conditions=since)
    run_with(FakeExecutor(), config, monkeypatch)
    args = [condition["overrides"]["environment"]["args"] for condition in manifest_of(tmp_path)["conditions"]]
    assert args == [{"since": "2026-01-01"}, {"since": "2026-01-02"}]
    executor = FakeExecutor()
    assert run_with(executor, config, monkeypatch) == 0 and executor.started == []


def test_the_manifest_is_complete_at_every_moment(tmp_path: Path, monkeypatch: Patch) -> None:
    executor, seen = FakeExecutor(), []
    executor.on_poll = lambda: seen.append(len(manifest_of(tmp_path)["runs"]))
    run_with(executor, campaign_config(tmp_path), monkeypatch)
    assert set(seen) == {4}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_run_and_the_campaign_can_be_resumed(
    tmp_path: Path, monkeypatch: Patch, number: int
) -> None:
    config = campaign_config(tmp_path, parallel=True, max_workers=2)
    executor = FakeExecutor()
    executor.on_poll = lambda: os.kill(os.getpid(), number) if executor.calls == [] else None
    assert run_with(executor, config, monkeypatch) == 130
    assert executor.calls[0] == "stop"
    assert sorted(statuses(tmp_path).values()) == ["interrupted", "interrupted", "pending", "pending"]
    assert manifest_of(tmp_path)["status"] == "interrupted"
    assert run_with(FakeExecutor(), config, monkeypatch) == 0


def test_runs_that_have_not_begun_start_anew_when_the_campaign_is_resumed(tmp_path: Path, monkeypatch: Patch) -> None:
    executor, seen = FakeExecutor(), set()
    executor.on_poll = lambda: os.kill(os.getpid(), signal.SIGINT) if executor.calls == [] else None
    assert run_with(executor, campaign_config(tmp_path), monkeypatch) == 130
    resumed = FakeExecutor()
    resumed.on_poll = lambda: seen.update(run.config.resume.from_ for run, _ in resumed.going.values())
    assert run_with(resumed, campaign_config(tmp_path, {"resume": {"from": str(tmp_path)}}), monkeypatch) == 0
    assert len(resumed.started) == 4 and seen == {""}


def test_runs_that_do_not_stop_are_killed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("retrain.campaign.run.GRACE_S", 0.05)
    executor = FakeExecutor()
    executor.stubborn = True

    def never() -> None:
        if not executor.calls:
            os.kill(os.getpid(), signal.SIGINT)
        if "kill" not in executor.calls:
            executor.going = {name: (run, 9) for name, (run, _) in executor.going.items()}

    executor.on_poll = never
    assert run_with(executor, campaign_config(tmp_path), monkeypatch) == 130
    assert executor.calls[:2] == ["stop", "kill"]
    assert statuses(tmp_path)["grpo+none_s1"] == "interrupted"


def test_an_error_of_ours_leaves_no_run_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    executor = FakeExecutor()

    def break_down() -> None:
        raise RuntimeError("a bug")

    executor.on_poll = break_down
    with pytest.raises(RuntimeError, match="a bug"):
        run_with(executor, campaign_config(tmp_path), monkeypatch)
    assert executor.calls == ["kill", "close"]


def test_the_end_compares_the_conditions(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    executor = FakeExecutor(lambda run: rate_by_seed(run) + (0.1 + run.seed / 10000) * (run.condition == "maxrl+none"))
    run_with(executor, campaign_config(tmp_path, seeds=[1, 2, 3, 4, 5]), monkeypatch)
    printed = capsys.readouterr().out
    assert "correct_rate at step 3, paired by seed:" in printed
    assert "statistically significant improvement" in printed
    assert "maxrl+none is better than grpo+none by 0.1003" in printed


def test_one_condition_alone_is_not_compared(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    assert run_with(FakeExecutor(), campaign_config(tmp_path, conditions=[GRPO]), monkeypatch) == 0
    assert "paired by seed" not in capsys.readouterr().out


def clearly_better(run: Run) -> float:
    return rate_by_seed(run) + (0.2 + run.seed / 10000 if run.condition == "maxrl+none" else 0.0)


def test_a_decided_pair_stops_and_says_so(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided")
    executor = FakeExecutor(clearly_better)
    assert run_with(executor, config, monkeypatch) == 0
    assert len(executor.started) == 10
    table = manifest_of(tmp_path)
    assert len(table["stop_when"]["skipped"]) == 6
    assert table["stop_when"]["alpha"] == 0.05
    assert table["stop_when"]["metric"] == "correct_rate"
    assert table["stop_when"]["decisions"]["maxrl+none"]["seeds"] == 5
    assert statuses(tmp_path)["maxrl+none_s8"] == "skipped"
    printed = capsys.readouterr().out
    assert "Decided after 5 seeds: maxrl+none is better than grpo+none" in printed
    assert 'stop_when = "decided" was used' in printed
    assert "skipped 6 runs: grpo+none_s6" in printed
    assert "Done: 10 runs, 6 skipped in " in printed
    assert cli(["status", str(tmp_path)]) == 0
    assert "campaign, finished, 16 of 16 runs done (6 skipped)\n" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "is_noted"), [(0, True), (14, True), (2, False)])
def test_a_campaign_that_starts_all_runs_at_once_skips_none_and_says_so(
    workers: int, is_noted: bool, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    how: dict[str, Any] = {"parallel": True, "max_workers": workers, "stop_when": "decided"}
    config = campaign_config(tmp_path, seeds=list(range(1, 8)), **how)
    assert run_with(FakeExecutor(clearly_better), config, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert ('Note: all 14 runs start at once, so stop_when = "decided" has none to skip' in printed) == is_noted
    assert ("All its seeds have started." in printed) == is_noted
    assert ("Its remaining seeds are skipped." in printed) != is_noted


@pytest.mark.slow
def test_a_campaign_that_stops_early_keeps_its_steps(tmp_path: Path, monkeypatch: Patch) -> None:
    settings: dict[str, Any] = {"seeds": list(range(1, 9)), "stop_when": "decided"}
    run_with(FakeExecutor(), campaign_config(tmp_path, **settings), monkeypatch)
    resumed = {"resume": {"from": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"tests runs of 4 steps; with max_steps = 6 .*  Try: max_steps = 4"):
        run_with(FakeExecutor(), campaign_config(tmp_path, resumed, max_steps=6, **settings), monkeypatch)
    longer = FakeExecutor()
    plain = campaign_config(tmp_path, resumed, max_steps=6, seeds=settings["seeds"])
    assert run_with(longer, plain, monkeypatch) == 0 and len(longer.started) == 16


@pytest.mark.parametrize("seeds", [range(1, 10), *slow(range(1, 8), [*range(1, 8), 20])])
def test_a_campaign_that_stops_early_keeps_its_seeds(tmp_path: Path, monkeypatch: Patch, seeds: Sequence[int]) -> None:
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided")
    run_with(FakeExecutor(), config, monkeypatch)
    before = (tmp_path / "config.toml").read_text()
    other = campaign_config(tmp_path, {"resume": {"from": str(tmp_path)}}, seeds=list(seeds), stop_when="decided")
    with pytest.raises(ConfigError, match=r"planned its tests for seeds \[1, 2, .*  Try: seeds = \[1, 2"):
        run_with(FakeExecutor(), other, monkeypatch)
    assert (tmp_path / "config.toml").read_text() == before


def test_a_campaign_keeps_its_held_out_problems(tmp_path: Path, monkeypatch: Patch) -> None:
    evaluated = {"eval": {"every": 2, "max_examples": 8}}
    run_with(FakeExecutor(), campaign_config(tmp_path, evaluated), monkeypatch)
    for run in planned(campaign_config(tmp_path, evaluated)):
        Checkpoints(run.folder, 1, print).save(4, {"log_sizes": {}}, lambda folder: None)
        (run.folder / "config.toml").write_text(dump_config(run.config), encoding="utf-8")
    other = {"eval": {"every": 2, "max_examples": 32}, "resume": {"from": str(tmp_path)}}
    with pytest.raises(CheckpointError, match=r"\[eval\] max_examples: 8 -> 32"):
        run_with(FakeExecutor(), campaign_config(tmp_path, other, seeds=[1, 2, 3]), monkeypatch)
    rarer = {"eval": {"every": 4, "max_examples": 8}, "resume": {"from": str(tmp_path)}}
    run_with(FakeExecutor(), campaign_config(tmp_path, rarer, seeds=[1, 2, 3]), monkeypatch)


@pytest.mark.parametrize("conditions", [[MAXRL, GRPO], [GRPO, MAXRL, GRPO | {"lr": 1e-3}], [GRPO]])
def test_a_campaign_that_stops_early_keeps_its_conditions(
    tmp_path: Path, monkeypatch: Patch, conditions: list[dict[str, Any]]
) -> None:
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided")
    run_with(FakeExecutor(clearly_better), config, monkeypatch)
    resumed = {"resume": {"from": str(tmp_path)}}
    changed = campaign_config(tmp_path, resumed, seeds=list(range(1, 9)), conditions=conditions)
    stopping = changed.model_copy(update={"campaign": changed.campaign.model_copy(update={"stop_when": "decided"})})
    with pytest.raises(ConfigError, match=r"planned its tests for maxrl\+none against grpo\+none"):
        run_with(FakeExecutor(clearly_better), stopping, monkeypatch)


def test_runs_that_get_more_steps_are_not_done_until_they_have_them(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    assert run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch) == 0
    executor = FakeExecutor()
    executor.on_poll = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert run_with(executor, campaign_config(tmp_path, max_steps=6), monkeypatch) == 130
    assert set(statuses(tmp_path).values()) == {"interrupted"}
    capsys.readouterr()
    assert cli(["status", str(tmp_path)]) == 0
    assert "campaign, interrupted, 0 of 4 runs done" in capsys.readouterr().out
    assert run_with(FakeExecutor(), campaign_config(tmp_path, max_steps=6), monkeypatch) == 0
    assert set(statuses(tmp_path).values()) == {"finished"}


def test_a_campaign_that_cannot_be_written_keeps_its_configuration(tmp_path: Path, monkeypatch: Patch) -> None:
    assert run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch) == 0
    before = (tmp_path / "config.toml").read_text()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_with(FakeExecutor(), campaign_config(tmp_path, max_steps=6), monkeypatch)
    assert (tmp_path / "config.toml").read_text() == before


@pytest.mark.slow
def test_a_run_that_was_skipped_and_then_run_is_not_called_skipped(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(
        FakeExecutor(clearly_better),
        campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided"),
        monkeypatch,
    )
    capsys.readouterr()
    run_with(FakeExecutor(clearly_better), campaign_config(tmp_path, seeds=list(range(1, 9))), monkeypatch)
    assert "no run was skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_decision_stands_when_the_campaign_is_started_again(tmp_path: Path, monkeypatch: Patch) -> None:
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided")
    run_with(FakeExecutor(clearly_better), config, monkeypatch)
    again = FakeExecutor(clearly_better)
    assert run_with(again, config, monkeypatch) == 0
    assert again.started == []
    without = FakeExecutor(clearly_better)
    run_with(without, campaign_config(tmp_path, seeds=list(range(1, 9))), monkeypatch)
    assert len(without.started) == 6


@pytest.mark.slow
def test_a_baseline_continues_while_one_condition_is_open(tmp_path: Path, monkeypatch: Patch) -> None:
    wobble = [0.03, -0.02, 0.01, -0.04, 0.02, 0.01, -0.03, 0.02]

    def rate(run: Run) -> float:
        if run.condition == "maxrl+gtpo":
            return rate_by_seed(run) + wobble[run.seed - 1]
        return clearly_better(run)

    conditions = [GRPO, MAXRL, {"advantage_mode": "maxrl", "transform_mode": "gtpo"}]
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided", conditions=conditions)
    executor = FakeExecutor(rate)
    run_with(executor, config, monkeypatch)
    counts = {c: sum(name.startswith(f"{c}_s") for name in executor.started) for c in ("grpo+none", "maxrl+none")}
    assert counts["grpo+none"] == 8
    assert counts["maxrl+none"] < 8


def test_conditions_with_an_edited_reward_are_not_called_better(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    reward = tmp_path / "edited.py"
    reward.write_text("def score(response, reference):\n    return 1.0\n")

    def edit_and_rate(run: Run) -> float:
        reward.write_text(f"def score(response, reference):\n    return 1.0  # {run.condition}\n")
        return clearly_better(run)

    tables = {
        "reward": {"type": "custom", "custom_module": "edited"},
        "plugins": {"search_paths": [str(tmp_path), str(TESTS)]},
    }
    config = campaign_config(tmp_path / "logs", tables, seeds=list(range(1, 9)), stop_when="decided")
    assert run_with(FakeExecutor(edit_and_rate), config, monkeypatch) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Decided after 5 seeds: maxrl+none differs from grpo+none" in printed
    assert "not measured alike: the code of edited changed between their runs" in printed
    assert "is better" not in printed and "improvement" not in printed


def test_conditions_with_other_rewards_are_not_called_better(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    conditions = [GRPO, GRPO | {"reward.correct_from": 0.2}]
    better = FakeExecutor(lambda run: rate_by_seed(run) if run.condition == "grpo+none" else 0.8 + run.seed % 3 / 100)
    config = campaign_config(tmp_path, seeds=list(range(1, 7)), stop_when="decided", conditions=conditions)
    assert run_with(better, config, monkeypatch) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Decided after 5 seeds: grpo+none_correct_from=0.2 differs from grpo+none" in printed
    assert printed.count("not measured alike: [reward] correct_from is 0.2 instead of 1.0") == 2  # before and after
    assert "is better" not in printed and "improvement" not in printed


def test_conditions_of_different_models_are_not_compared(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    model = str(shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "model"))
    # A copy with the same files is the same model.
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.5}')
    config = campaign_config(tmp_path / "logs", conditions=[GRPO, GRPO | {"model.model": model}])
    assert run_with(FakeExecutor(), config, monkeypatch) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No comparison: the runs train different models" in printed
    assert "Note: conditions train different models" in printed


@pytest.mark.slow
def test_equal_conditions_are_not_stopped(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    config = campaign_config(tmp_path, seeds=list(range(1, 8)), stop_when="decided")
    executor = FakeExecutor()
    run_with(executor, config, monkeypatch)
    assert len(executor.started) == 14
    assert "no run was skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_the_last_table_judges_at_the_level_of_the_sequential_test(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    # p = 0.033 with all 8 seeds, and never below the level of a look, 0.0225.
    more = (0.06, -0.02, 0.05, 0.01, 0.07, 0.02, 0.05, 0.0)
    executor = FakeExecutor(lambda run: 0.5 + (more[run.seed - 1] if run.condition == "maxrl+none" else 0.0))
    config = campaign_config(tmp_path, seeds=list(range(1, 9)), stop_when="decided")
    run_with(executor, config, monkeypatch)
    printed = capsys.readouterr().out
    assert "Decided after" not in printed
    assert "insufficient evidence" in printed and "significant improvement" not in printed
    assert "has the level 0.02246" in printed


@pytest.mark.parametrize("stop_when", ["", "decided"])
def test_untrained_weights_are_not_compared(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured, stop_when: str
) -> None:
    class Evaluated(FakeExecutor):
        def _end(self, run: Run) -> RunExit:
            exited = super()._end(run)
            steps = (0, 4) if run.condition == "grpo+none" else (0, 3)
            rows = [{"step": step, "eval_pass_at_1": 0.5 + 0.1 * step, "k": 1} for step in steps]
            (run.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return exited

    config = campaign_config(tmp_path, seeds=list(range(1, 8)), stop_when=stop_when)
    assert run_with(Evaluated(), config, monkeypatch) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No comparison: there is no common evaluation after training" in printed
    assert "or retrain compare FOLDER --metric correct_rate" in printed
    assert "(grpo+none: steps 0, 4; maxrl+none: steps 0, 3)" in printed and "at step 0" not in printed


def test_a_part_that_is_absent_is_rejected_for_each_condition(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match="attention_kernel"):
        config = campaign_config(tmp_path / "c", conditions=[GRPO, MAXRL | {"attention_kernel": "tk"}])
        run_with(FakeExecutor(), config, monkeypatch)
    assert not (tmp_path / "c").exists()


def test_every_problem_is_named_with_the_conditions_that_have_it(tmp_path: Path, monkeypatch: Patch) -> None:
    conditions = [GRPO, MAXRL | {"attention_kernel": "tk"}, GRPO | {"loss.type": "nothere.Loss", "lr": 1e-3}]
    with pytest.raises(ConfigError) as caught:
        run_with(FakeExecutor(), campaign_config(tmp_path / "c", conditions=conditions), monkeypatch)
    of_kernel, kernel, loss = str(caught.value).splitlines()
    assert of_kernel.startswith("maxrl+none_attention_kernel=tk: ") and "[inference] attention_kernel" in kernel
    assert loss.startswith("grpo+none_loss.type=nothere.Loss_lr=0.001: ")
    with pytest.raises(ConfigError) as caught:
        tables = {"inference": {"attention_kernel": "tk"}}
        run_with(FakeExecutor(), campaign_config(tmp_path / "c", tables), monkeypatch)
    assert str(caught.value).count("attention_kernel") == 1 and "maxrl+none" not in str(caught.value)


def test_a_folder_of_another_version_is_rejected_unless_forced(tmp_path: Path, monkeypatch: Patch) -> None:
    config = campaign_config(tmp_path)
    run_with(FakeExecutor(codes={"grpo+none_s1": 1}), config, monkeypatch)
    table = manifest_of(tmp_path)
    table["versions"]["retrain"] = "0.0.7"
    (tmp_path / "manifest.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"was run by retrain 0\.0\.7.*--force-resume"):
        run_with(FakeExecutor(), config, monkeypatch)
    assert run_with(FakeExecutor(), config, monkeypatch, force=True) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": 99}', "has format 99; this version of retrain reads 1"),
        ('{"form', "cannot be read"),
        ("[]", "None"),
    ],
)
def test_a_manifest_of_another_format_or_a_torn_one_is_rejected(
    tmp_path: Path, monkeypatch: Patch, text: str, words: str
) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch)


def test_other_settings_in_the_same_folder_are_rejected_with_the_difference(tmp_path: Path, monkeypatch: Patch) -> None:
    run_with(FakeExecutor(codes={"maxrl+none_s2": 1}), campaign_config(tmp_path), monkeypatch)
    changed = campaign_config(tmp_path, {"training": {"lr": 1e-3}})
    with pytest.raises(CheckpointError, match=r"\[training\] lr: 4e-05 -> 0\.001"):
        run_with(FakeExecutor(), changed, monkeypatch)
    assert run_with(FakeExecutor(), changed, monkeypatch, force=True) == 0


def test_a_model_whose_files_have_changed_is_rejected(tmp_path: Path, monkeypatch: Patch) -> None:
    model = str(shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "model"))
    config = campaign_config(tmp_path / "logs", {"model": {"model": model}})
    assert run_with(FakeExecutor(), config, monkeypatch) == 0
    more = campaign_config(tmp_path / "logs", {"model": {"model": model}}, seeds=[1, 2, 3])
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(CheckpointError, match=r"the model .*model has changed since: chat_template.jinja"):
        run_with(FakeExecutor(), more, monkeypatch)
    assert run_with(FakeExecutor(), more, monkeypatch, force=True) == 0


@pytest.mark.parametrize(
    "edited", ['{"prompt": "1+2=", "answer": "3", "want": "a"}\n', '{"prompt": "1+1=", "answer": "2", "want": "b"}\n']
)
def test_held_out_problems_that_have_changed_are_rejected(tmp_path: Path, monkeypatch: Patch, edited: str) -> None:
    problems = tmp_path / "held_out.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2", "want": "a"}\n')
    tables = {"eval": {"every": 2, "source": "jsonl", "path": str(problems)}}
    assert run_with(FakeExecutor(), campaign_config(tmp_path / "logs", tables), monkeypatch) == 0
    more = campaign_config(tmp_path / "logs", tables, seeds=[1, 2, 3, 4])
    problems.write_text(edited)
    with pytest.raises(CheckpointError, match=r"the held-out problems in .*held_out.jsonl have changed since\n"):
        run_with(FakeExecutor(), more, monkeypatch)
    # The same problems in another place, as in a project that was copied to another machine.
    copied = tmp_path / "copied.jsonl"
    copied.write_text('{"prompt": "1+1=", "answer": "2", "want": "a"}\n')
    elsewhere = campaign_config(tmp_path / "logs", {"eval": tables["eval"] | {"path": str(copied)}}, seeds=[1, 2, 3])
    assert run_with(FakeExecutor(), elsewhere, monkeypatch) == 0
    assert run_with(FakeExecutor(), more, monkeypatch, force=True) == 0


@pytest.mark.parametrize("used", [0, 1])
def test_what_was_edited_between_sessions_is_a_warning(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured, used: int
) -> None:
    reward, problems = tmp_path / "edited.py", tmp_path / "problems.jsonl"
    reward.write_text("def score(response, reference):\n    return 1.0\n")
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    tables = {
        "data": {"source": "jsonl", "path": str(problems)},
        "training": {"max_examples": used},
        "reward": {"type": "custom", "custom_module": "edited"},
        "plugins": {"search_paths": [str(tmp_path), str(TESTS)]},
    }

    def warnings(seeds: int) -> list[str]:
        config = campaign_config(tmp_path / "logs", tables, seeds=list(range(1, seeds + 1)))
        for run in planned(config):
            path = run.folder / "trainer_state.json"
            if path.exists():
                state = json.loads(path.read_text())
                data = ExampleOrder(load_examples(config.data), 1, used).digest
                path.write_text(json.dumps({"data": data} | state))
        assert run_with(FakeExecutor(), config, monkeypatch) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]

    assert warnings(1) == warnings(2) == []
    reward.write_text("def score(response, reference):\n    return 0.5\n")
    (line,) = warnings(3)
    assert line.startswith("Warning: the code of edited changed since grpo+none_s1")
    reward.write_text("def score(response, reference):\n    return 1.0\n")
    problems.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "2+2=", "answer": "4"}\n')
    assert any(line.startswith("Warning: the training data changed since grpo+none_s1") for line in warnings(4))


def test_two_sessions_cannot_share_a_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    from retrain.storage.folder import lock_folder

    with lock_folder(tmp_path), pytest.raises(ConfigError, match="is in use by another run"):
        run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch)


def test_a_run_that_continues_by_itself_is_not_started_twice(tmp_path: Path, monkeypatch: Patch) -> None:
    from retrain.storage.folder import lock_folder

    config = campaign_config(tmp_path)
    folder = planned(config)[1].folder
    folder.mkdir(parents=True)
    with lock_folder(folder), pytest.raises(ConfigError, match=r"maxrl.none_s1 of .* is still running"):
        run_with(FakeExecutor(), config, monkeypatch)


def test_the_folder_has_the_date_in_its_name_unless_one_is_asked_for(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = choose_folder(campaign_config(None))
    assert folder.parent == tmp_path / "logs"
    assert re.fullmatch(r"campaign_\d{8}_\d{6}", folder.name)
    folder.mkdir(parents=True)
    assert choose_folder(campaign_config(None)) != folder
    assert choose_folder(campaign_config(Path("mine"))) == tmp_path / "mine"


def test_resuming_needs_a_campaign_and_its_own_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        choose_folder(campaign_config(None, {"resume": {"from": str(tmp_path)}}))
    (tmp_path / "manifest.json").write_text("{}")
    assert choose_folder(campaign_config(None, {"resume": {"from": str(tmp_path)}})) == tmp_path
    assert choose_folder(campaign_config(tmp_path, {"resume": {"from": str(tmp_path)}})) == tmp_path
    (tmp_path / "link").symlink_to(".")
    assert choose_folder(campaign_config(tmp_path, {"resume": {"from": str(tmp_path / "link")}})) == tmp_path / "link"
    with pytest.raises(ConfigError, match="is not the campaign to resume"):
        choose_folder(campaign_config(tmp_path / "other", {"resume": {"from": str(tmp_path)}}))


def test_ray_that_is_not_installed_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: Patch) -> None:
    import sys

    from retrain.campaign.run import run_campaign
    from retrain.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "retrain.campaign.ray", raising=False)
    with pytest.raises(MissingExtraError, match=r'needs the package ray.*pip install -e ".*\[ray\]"'):
        run_campaign(campaign_config(tmp_path / "c", executor="ray"))
    assert not (tmp_path / "c").exists()


def test_a_pipe_gets_the_progress_of_the_runs(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("retrain.campaign.screen.PLAIN_EVERY_S", 0.0)
    executor: Any = FakeExecutor()
    executor.on_poll = lambda: [write_result(run, 0.25, 1, "running") for run, _ in executor.going.values()]
    run_with(executor, campaign_config(tmp_path), monkeypatch)
    printed = capsys.readouterr().out
    assert re.search(r"^  grpo\+none_s1: step 1/4, correct 25\.0%, ETA [12] s$", printed, re.MULTILINE)
    assert re.search(r"^  0 of 4 runs done, ETA 8 s$", printed, re.MULTILINE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_table_of_all_runs(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("retrain.campaign.screen.LIVE_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert run_with(FakeExecutor(codes={"maxrl+none_s1": 1}), campaign_config(tmp_path), monkeypatch) == 1
    # Without colours; what is redrawn is there once more.
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert all(word in shown for word in ("run", "state", "step", "ETA", "correct", "held-out"))
    last = shown.rpartition("held-out")[2]
    assert re.search(r"grpo\+none_s1 +finished +4/4 +- +50\.1%", last)
    assert re.search(r"maxrl\+none_s1 +failed +2/4", last)
    assert "3 of 4 runs done" in last


def test_a_closed_output_does_not_end_a_campaign(tmp_path: Path, monkeypatch: Patch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    assert run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch) == 0
    assert set(statuses(tmp_path).values()) == {"finished"}


@pytest.mark.parametrize("named", [{"advantage_mode": "nothere.advantage"}, {"loss.type": "nothere.Loss"}])
def test_a_condition_with_a_plugin_that_does_not_load_is_rejected_before_any_run(
    tmp_path: Path, monkeypatch: Patch, named: dict[str, str]
) -> None:
    executor = FakeExecutor()
    with pytest.raises(RetrainError, match="nothere"):
        run_with(executor, campaign_config(tmp_path, conditions=[GRPO, GRPO | named]), monkeypatch)
    assert not executor.started


@pytest.mark.parametrize("invalid", ["data", "eval"])
def test_an_invalid_row_is_rejected_before_any_run(tmp_path: Path, monkeypatch: Patch, invalid: str) -> None:
    tables = {"data": {"source": "jsonl"}, "eval": {"every": 1}}
    for name, table in tables.items():
        rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="} | ({} if name == invalid else {"answer": "4"})]
        table["path"] = str(tmp_path / f"{name}.jsonl")
        Path(table["path"]).write_text("\n".join(map(json.dumps, rows)))
    executor, config = FakeExecutor(), campaign_config(tmp_path / "logs", tables)
    with pytest.raises(RetrainError, match=rf"{invalid}.jsonl has 1 invalid row:\s+line 2 has none of .* answer"):
        run_with(executor, config, monkeypatch)
    assert not executor.started and not (tmp_path / "logs").exists()


def test_a_run_that_ended_before_its_first_checkpoint_takes_new_settings(tmp_path: Path, monkeypatch: Patch) -> None:
    before, after = (campaign_config(tmp_path, conditions=[GRPO, MAXRL | {"lr": lr}]) for lr in (1e-3, 2e-3))
    failing = [run.name for run in planned(before) if run.name.startswith("maxrl")]
    assert run_with(FakeExecutor(codes=dict.fromkeys(failing, 1)), before, monkeypatch) == 1
    # What the fake leaves of them has no checkpoint.
    assert run_with(FakeExecutor(), after, monkeypatch) == 0
