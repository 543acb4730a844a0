from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rich.console
from folders import write_run

from retrain.campaign.manifest import now
from retrain.campaign.progress import (
    RunProgress,
    is_finished,
    is_locked,
    read_progress,
    read_tail,
    seconds_left,
    taking_turns,
)
from retrain.cli import run
from retrain.cli.status import find_entries, read_campaign
from retrain.cli.top import choose, draw
from retrain.report.contents import collect
from retrain.storage.folder import lock_folder

from .campaigns import FakeExecutor, campaign_config, planned, run_with, write_result

Captured = pytest.CaptureFixture[str]
HOLD = """
import sys, time
from pathlib import Path
from retrain.storage.folder import lock_folder

held = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def status_of(folder: Path, capsys: Captured) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["status", str(folder), "--json"]) == 0
    entries: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return entries


def test_a_run_of_trl_is_listed_as_of_its_last_checkpoint(tmp_path: Path, capsys: Captured) -> None:
    for step, folder in ((4, "tiny/checkpoint-4"), (8, "tiny/checkpoint-8")):
        state = {
            "global_step": step,
            "max_steps": 10,
            "log_history": [{"step": step, "reward": step / 10}, {"loss": 1}],
        }
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
        os.utime(tmp_path / folder / "trainer_state.json", (step, step))
    (entry,) = status_of(tmp_path, capsys)
    progress = entry["runs"]["tiny"]
    assert (entry["status"], progress["step"], progress["mean_reward"]) == ("unfinished", 8, 0.8)
    with lock_folder(tmp_path / "tiny"):
        (entry,) = status_of(tmp_path, capsys)
        assert (entry["status"], entry["live"], entry["runs"]["tiny"]["step"]) == ("running", True, 8)
    (tmp_path / "tiny" / "trainer_state.json").write_text(json.dumps({"global_step": 10, "max_steps": 10}))
    (entry,) = status_of(tmp_path, capsys)
    assert (entry["status"], entry["live"], entry["runs"]["tiny"]["step"]) == ("finished", False, 10)


def test_the_order_is_that_of_the_last_steps_whatever_is_written_later(tmp_path: Path, capsys: Captured) -> None:
    for age, name in enumerate(("c", "a", "camp/runs/x_s1", "b")):
        write_run(tmp_path / name, [0.1])
        os.utime(tmp_path / name / "metrics.jsonl", (1000.0 + age, 1000.0 + age))
    (tmp_path / "camp" / "manifest.json").write_text("{}")
    (tmp_path / "begun").mkdir()
    for name in ("config.toml", "trainer_state.json"):
        (tmp_path / "begun" / name).write_bytes((tmp_path / "a" / name).read_bytes())
        os.utime(tmp_path / "begun" / name, (900.0, 900.0))
    (tmp_path / "c" / "report.html").write_text("a report")
    entries = status_of(tmp_path, capsys)
    assert [Path(entry["path"]).name for entry in entries] == ["begun", "c", "a", "camp", "b"]


def test_the_help_names_every_key_of_the_json(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path / "train", [0.1])
    (entry,) = status_of(tmp_path, capsys)
    assert run(["status", "--help"]) == 0
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {*entry, *entry["runs"]["train"]} <= words


def test_a_finished_run_shows_its_last_numbers(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path / "logs" / "train", [0.1, 0.4], {2: [1, 0, 0, 0]})
    (entry,) = status_of(tmp_path / "logs", capsys)
    assert (entry["kind"], entry["status"], entry["live"]) == ("run", "finished", False)
    shown = entry["runs"]["train"]
    assert (shown["step"], shown["max_steps"], shown["correct_rate"], shown["held_out"]) == (2, 2, 0.4, 0.25)
    assert (shown["condition"], shown["seed"], shown["eta_seconds"]) == ("grpo+none", 42, None)
    assert run(["status", str(tmp_path / "logs")]) == 0
    assert "finished" in (printed := capsys.readouterr().out)
    assert "40.0%" in printed


def test_a_run_with_a_problem_shows_all_its_checks(tmp_path: Path, capsys: Captured) -> None:
    for name, rate in (("cut", 0.5), ("sound", 0.0)):
        metrics = write_run(tmp_path / name, [0.1] * 12) / "metrics.jsonl"
        rows = [
            json.loads(line) | {"max_token_hit_rate": rate, "ratio_mean": 1.0}
            for line in metrics.read_text().splitlines()
        ]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["status", str(tmp_path / "cut"), str(tmp_path / "sound")]) == 0
    printed = capsys.readouterr().out
    assert "  cut: problem: truncation 50% of completions (since step 0); ok: " in printed and "mismatch" in printed
    assert "  sound: " not in printed and "sound: run, finished" in printed


def test_a_run_is_live_while_its_lock_is_held_and_dead_after(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "train", [0.1, 0.4], status="running", training__max_steps=10)
    with lock_folder(folder):
        live = read_progress(folder)
        assert live.status == "running"
        # Eight steps at a mean of one second.
        assert live.eta_seconds == pytest.approx(8.0, abs=1.0)
    assert read_progress(folder).status == "dead"
    assert read_progress(folder).eta_seconds is None


def test_a_run_that_loads_its_model_says_so(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    with lock_folder(folder):
        (entry,) = status_of(tmp_path, capsys)
        assert (entry["status"], entry["runs"]["train"]["activity"]) == ("running", "loading")
        assert run(["status", str(tmp_path)]) == 0
        assert f"{folder}: run, loading" in capsys.readouterr().out
        # The configuration is written when everything is loaded.
        write_run(folder, [0.1], status="running", training__max_steps=10)
        assert read_progress(folder).state == "running"
    # Resumed: the files of the earlier attempt are older than the lock.
    with lock_folder(folder):
        assert read_progress(folder).state == "loading"


def test_the_time_before_a_resume_is_not_time_in_a_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "train", [0.1, 0.4], status="interrupted", training__max_steps=10)
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(folder / name, (1000.0, 1000.0))
    assert (read_progress(folder).quiet_seconds or 0.0) > 1e6, "since its last step"
    with lock_folder(folder):
        loading = read_progress(folder)
        # Eight steps at a mean of one second.
        assert (loading.state, loading.eta_seconds) == ("loading", 8.0)
        assert loading.quiet_seconds == pytest.approx(0.0, abs=2.0)
        (folder / "config.toml").touch()
        running = read_progress(folder)
        assert (running.state, running.eta_seconds) == ("running", pytest.approx(8.0, abs=2.0))


def test_a_finished_run_that_loads_to_be_extended_has_no_known_end(tmp_path: Path, capsys: Captured) -> None:
    folder = write_run(tmp_path / "train", [0.1, 0.4])
    os.utime(folder / "config.toml", (1000.0, 1000.0))
    assert (read_progress(folder).step, read_progress(folder).max_steps) == (2, 2)
    with lock_folder(folder):
        loading = read_progress(folder)
        assert (loading.state, loading.step, loading.max_steps, loading.eta_seconds) == ("loading", 2, None, None)
        assert run(["status", str(tmp_path)]) == 0
        assert "2/2" not in capsys.readouterr().out


def test_a_run_of_its_own_has_no_elapsed_time(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path / "train", [0.1])
    (entry,) = status_of(tmp_path, capsys)
    assert entry["runs"]["train"]["elapsed_seconds"] is None
    assert run(["status", "--help"]) == 0
    assert "elapsed_seconds (otherwise null)" in capsys.readouterr().out


def test_a_run_after_its_last_step_is_evaluating(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train").mkdir()
    with lock_folder(tmp_path / "train"):
        folder = write_run(tmp_path / "train", [0.1, 0.4], status="running", eval__every=1)
        assert read_progress(folder).state == "evaluating"
        assert read_progress(folder).eta_seconds is None
    write_run(folder, [0.1, 0.4], eval__every=1)
    (entry,) = status_of(tmp_path, capsys)
    assert (entry["status"], entry["runs"]["train"]["activity"]) == ("finished", "")


def test_a_dead_run_shows_the_command_that_resumes_it(tmp_path: Path, capsys: Captured) -> None:
    folder = write_run(tmp_path / "my train", [0.1], status="running", training__max_steps=10)
    checkpoint = folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    # A kill right after the first checkpoint leaves no such file.
    (folder / "trainer_state.json").unlink()
    assert run(["status", str(tmp_path)]) == 0
    assert f"To resume: retrain --resume '{folder}'" in capsys.readouterr().out
    assert run(["top", str(tmp_path), "--all"]) == 0
    assert "To resume: retrain --resume" in capsys.readouterr().out
    checkpoint.rmdir()
    assert run(["status", str(tmp_path)]) == 0
    assert "It ended before its first checkpoint: start it again." in capsys.readouterr().out


def test_the_lock_of_a_killed_process_counts_for_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    process.kill()
    process.communicate()
    assert not is_locked(tmp_path)
    # A number that now belongs to somebody else is not believed either.
    (tmp_path / ".lock").write_text(str(os.getpid()))
    assert not is_locked(tmp_path)
    (tmp_path / ".lock").write_text("nonsense")
    assert not is_locked(tmp_path)


def test_a_run_that_has_not_logged_yet_is_pending(tmp_path: Path) -> None:
    assert read_progress(tmp_path).status == "pending"
    assert read_progress(tmp_path / "nowhere").status == "pending"


def test_the_steps_of_a_run_of_epochs_are_those_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nepochs = 2.0\nmax_steps = 500\n")
    assert read_progress(tmp_path).max_steps is None
    (tmp_path / "trainer_state.json").write_text('{"step": 2, "max_steps": 2, "status": "finished"}')
    assert read_progress(tmp_path).max_steps == 2


def test_a_failed_run_says_why(tmp_path: Path, capsys: Captured) -> None:
    folder = write_run(tmp_path / "train", [0.1], status="failed", training__max_steps=10)
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {"error": "scoring failed for 9 of 9 completions"}))
    assert run(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{folder}: run, failed" in printed
    assert "  train failed: scoring failed for 9 of 9 completions\n" in printed
    (entry,) = find_entries(tmp_path)
    drawn = io.StringIO()
    rich.console.Console(file=drawn, width=120).print(draw([entry]))
    assert "train failed: scoring failed for 9 of 9 completions" in drawn.getvalue()
    assert collect([folder])["runs"][0]["error"] == "scoring failed for 9 of 9 completions"
    # A resumed run is running, whatever ended it before.
    with lock_folder(folder):
        assert (read_progress(folder).status, read_progress(folder).error) == ("running", "")


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "train", [0.1], status="interrupted", training__max_steps=10)
    assert read_progress(folder).status == "interrupted"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer_state.json", '{"step": null, "status": "finished"}'),
        ("trainer_state.json", '{"step": 1e999, "status": "finished"}'),
        ("trainer_state.json", '{"step": {}}'),
        ("metrics.jsonl", '{"step": 1, "correct_rate": "high"}\n'),
        ("config.toml", "training = 5\n"),
        ("config.toml", "[training]\nmax_steps = 'many'\n"),
    ],
)
def test_a_run_with_odd_files_is_unreadable_and_the_others_are_listed(
    tmp_path: Path, capsys: Captured, name: str, text: str
) -> None:
    write_run(tmp_path / "fine", [0.1, 0.4])
    write_run(tmp_path / "odd", [0.1, 0.4], {2: [1, 0]})
    (tmp_path / "odd" / name).write_text(text)
    assert {entry.path: entry.status for entry in find_entries(tmp_path)} == {
        str(tmp_path / "fine"): "finished",
        str(tmp_path / "odd"): "unreadable",
    }
    assert run(["status", str(tmp_path)]) == 0
    assert "unreadable" in capsys.readouterr().out
    assert is_finished(tmp_path / "odd", 3) is False


def test_an_odd_evaluation_is_skipped_like_a_torn_line(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.4], {2: [1, 0]})
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write('{"step": 3, "eval_pass_at_1": [1]}\n')
    progress = read_progress(tmp_path)
    assert (progress.status, progress.held_out) == ("finished", 0.5)


@pytest.mark.parametrize("state", ['{"global_step": null}', '{"global_step": 1, "log_history": [5]}'])
def test_a_run_of_trl_with_an_odd_state_is_unreadable(tmp_path: Path, capsys: Captured, state: str) -> None:
    (tmp_path / "trainer_state.json").write_text(state)
    (entry,) = status_of(tmp_path, capsys)
    assert entry["status"] == "unreadable"


@pytest.mark.parametrize("owner", ["²", "9" * 40, "\udcff"])
def test_a_lock_file_with_odd_contents_is_no_lock(tmp_path: Path, owner: str) -> None:
    (tmp_path / ".lock").write_text(owner, errors="surrogateescape")
    assert not is_locked(tmp_path)


def test_the_checks_of_a_long_run_look_at_all_of_it_and_follow_what_is_appended_and_cut(tmp_path: Path) -> None:
    write_run(tmp_path, [0.5])
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])

    def write(steps: int, dead: range, mode: str = "w", start: int = 0) -> None:
        with (tmp_path / "metrics.jsonl").open(mode) as file:
            for step in range(start, steps):
                groups = {"batch_size": 4, "groups_all_right": 4 * (step in dead), "groups_all_wrong": 0}
                file.write(json.dumps(first | groups | {"step": step, "pad": "x" * 2000, "time": time.time()}) + "\n")

    def since() -> int | None:
        return next(check.step for check in read_progress(tmp_path).health if check.name == "dead groups")

    write(600, range(300, 900))
    # The mean of ten steps reaches a half at the fifth.
    assert since() == 304
    write(700, range(300, 900), "a", 600)
    assert since() == 304
    write(700, range(650, 900))
    assert since() == 654
    write(500, range(650, 900))
    assert since() is None
    assert read_progress(tmp_path, checks=False).health == ()


def test_a_torn_log_is_read_up_to_the_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n[1]\nnonsense\n{"step": 1}\n{"st')
    assert read_tail(path) == [{"step": 0}, {"step": 1}]
    path.write_text("".join(json.dumps({"step": s, "text": "x" * 1000}) + "\n" for s in range(500)))
    rows = read_tail(path)
    assert rows[-1]["step"] == 499
    assert len(rows) < 500


def test_campaigns_show_all_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    folder = tmp_path / "logs" / "sweep" / "c"
    config = campaign_config(folder)
    run_with(FakeExecutor(codes={"maxrl+none_s1": 1}), config, monkeypatch)
    (entry,) = status_of(tmp_path / "logs", capsys)
    assert (entry["kind"], entry["status"], entry["live"]) == ("campaign", "failed", False)
    assert entry["runs"]["maxrl+none_s1"]["status"] == "failed"
    assert run(["status", str(tmp_path / "logs")]) == 0
    assert "campaign, failed, 3 of 4 runs done" in capsys.readouterr().out


def test_a_run_whose_folder_was_removed_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path / "sweep"), monkeypatch)
    done = read_campaign(tmp_path / "sweep").runs
    assert {run.status for run in done.values()} == {"finished"}
    shutil.rmtree(tmp_path / "sweep" / "runs" / next(iter(done)))
    table = json.loads((tmp_path / "sweep" / "manifest.json").read_text())
    for status in ("finished", "interrupted"):
        table["runs"][0]["status"] = status
        (tmp_path / "sweep" / "manifest.json").write_text(json.dumps(table))
        assert next(iter(read_campaign(tmp_path / "sweep").runs.values())).status == "pending"
    capsys.readouterr()
    assert run(["status", str(tmp_path / "sweep")]) == 0
    printed = capsys.readouterr().out
    assert f"campaign, interrupted, {len(done) - 1} of {len(done)} runs done" in printed and "To resume: " in printed


def test_a_run_that_is_killed_before_the_first_of_more_steps_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(FakeExecutor(), campaign_config(tmp_path), monkeypatch)
    table = json.loads((tmp_path / "manifest.json").read_text())
    # As the next session, of more steps, left it: both were killed while the run loaded.
    table["runs"][0] |= {"status": "running", "max_steps": 8, "started": now()}
    (tmp_path / "manifest.json").write_text(json.dumps(table))
    os.utime(tmp_path / table["runs"][0]["folder"] / "metrics.jsonl", (1000.0, 1000.0))
    with lock_folder(tmp_path):
        loading = next(iter(read_campaign(tmp_path).runs.values()))
    assert loading.status == "running" and loading.quiet_seconds is not None and loading.quiet_seconds < 100
    first, second = list(read_campaign(tmp_path).runs.values())[:2]
    assert (first.status, first.step, first.max_steps, second.status) == ("dead", 4, 8, "finished")


def test_a_live_campaign_has_an_eta_and_a_dead_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config = campaign_config(tmp_path / "c")
    executor = FakeExecutor()
    seen: list[dict[str, Any]] = []

    def look() -> None:
        for going, _ in executor.going.values():
            write_result(going, 0.25, 1, "running")
        seen.extend(status_of(tmp_path, capsys))

    executor.on_poll = look
    run_with(executor, config, monkeypatch)
    assert (seen[0]["status"], seen[0]["live"]) == ("running", True)
    # Fifteen steps left of four runs, half a second each, and what three more starts take as the first one did.
    assert seen[0]["eta_seconds"] >= 7.5
    assert seen[0]["runs"]["grpo+none_s1"]["status"] == "running"
    assert seen[0]["runs"]["maxrl+none_s2"]["status"] == "pending"
    table = json.loads((tmp_path / "c" / "manifest.json").read_text())
    table["status"] = table["runs"][0]["status"] = "running"
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(table))
    write_result(planned(config)[0], 0.25, 1, "running")
    (entry,) = status_of(tmp_path, capsys)
    assert (entry["status"], entry["eta_seconds"]) == ("dead", None)
    assert entry["runs"]["grpo+none_s1"]["status"] == "dead"


def test_what_a_resumed_campaign_has_to_resume_counts_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("retrain.campaign.screen.PLAIN_EVERY_S", 0.0)
    config = campaign_config(tmp_path / "c")
    names = [one.name for one in planned(config)]
    assert run_with(FakeExecutor(codes=dict.fromkeys(names, 1)), config, monkeypatch) == 1
    for one in planned(config):
        os.utime(one.folder / "metrics.jsonl", (1000.0, 1000.0))
    capsys.readouterr()
    run_with(FakeExecutor(), config, monkeypatch)
    # Two of four steps are left of each of the four runs, half a second each; no start took time.
    assert "0 of 4 runs done, ETA 4 s" in capsys.readouterr().out


def test_a_campaign_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text('{"format": 7}')
    (entry,) = status_of(tmp_path, capsys)
    assert entry["status"] == "unreadable"
    assert "format 7" in entry["problem"]


def test_no_runs_and_no_folder_are_reported(tmp_path: Path, capsys: Captured) -> None:
    assert run(["status", str(tmp_path)]) == 0
    assert "There are no runs in" in capsys.readouterr().out
    assert run(["status", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_top_shows_what_lives(tmp_path: Path, capsys: Captured) -> None:
    folder = write_run(tmp_path / "alive", [0.1], status="running", training__max_steps=10)
    write_run(tmp_path / "over", [0.1])
    with lock_folder(folder):
        assert run(["top", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "alive" in printed
        assert "over" not in printed
        assert len(choose([tmp_path], show_all=True)) == 2
        from rich.console import Console

        console = Console(width=100)
        with console.capture() as captured:
            console.print(draw(choose([tmp_path], show_all=False)))
        assert "1/10" in captured.get()
    assert "Nothing is running" in str(draw([]))


def test_runs_that_take_turns_wait_for_each_other() -> None:
    runs = {name: RunProgress("running", 5, 10, step_seconds=2.0, quiet_seconds=3.0) for name in "abc"}
    shown = taking_turns(runs | {"d": RunProgress("pending", 0, 10)})
    assert shown["a"].eta_seconds == 5 * 2.0 * 3 - 3.0
    assert shown["d"].eta_seconds is None
    assert runs["a"].eta_seconds == 7.0


def test_time_left_is_shared_by_those_that_run_at_once() -> None:
    runs = [RunProgress("running", 5, 10, step_seconds=2.0), RunProgress("pending", 0, 10)]
    assert seconds_left(runs, 1) == 30.0
    assert seconds_left(runs, 2) == 15.0
    assert seconds_left(runs, 8) == 15.0
    assert seconds_left([RunProgress("pending", 0, 10)], 1) is None
    # A run of 10 steps of 1 s took 50 s: every start costs 40 s more, less what one that loads has waited already.
    done = RunProgress("finished", 10, 10, step_seconds=1.0, elapsed_seconds=50.0)
    assert done.overhead_seconds == 40.0
    loading = RunProgress("running", 0, 10, elapsed_seconds=15.0)
    assert seconds_left([done, loading, RunProgress("pending", 0, 10)], 1) == 10 + 25 + 10 + 40
    # Half-way, and 2 s into a step: 12 s of loading.
    running = RunProgress("running", 5, 10, step_seconds=1.0, quiet_seconds=2.0, elapsed_seconds=19.0)
    assert seconds_left([running, RunProgress("pending", 0, 10)], 1) == 5 + 10 + 12
    twice = RunProgress("interrupted", 10, 20, step_seconds=1.0, elapsed_seconds=50.0, attempts=2)
    assert twice.overhead_seconds == 20.0
    assert seconds_left([RunProgress("finished", 10, 10, step_seconds=1.0)], 1) == 0.0
    # How long an evaluation takes is unknown.
    evaluating = RunProgress("running", 10, 10, step_seconds=1.0, activity="evaluating")
    assert seconds_left([done, evaluating], 1) is None
    # Runs of an earlier session start once more: one has been loading for 5 s of 40, the other waits.
    resumed = RunProgress("running", 5, 10, quiet_seconds=5.0, elapsed_seconds=60.0, activity="loading")
    waiting = RunProgress("interrupted", 2, 10)
    assert seconds_left([done, resumed, waiting], 1) == 5 + 35 + 8 + 40
