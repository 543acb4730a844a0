from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import re
import struct
import sys
import time
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.campaign.plan import plan_runs
from retrain.config import TrainConfig, build_config, load_config
from retrain.errors import CheckpointError, ConfigError, MissingExtraError
from retrain.rewards.weighted import WeightedScore
from retrain.storage.logs import DEBUG, FILES, GENERATIONS, cut_logs, restore_logs
from retrain.storage.logs import METRICS as METRICS_FILE
from retrain.tracking import ThrottledTracker, Trackers, metric_name
from retrain.tracking.console import ERASE, Console, step_line
from retrain.tracking.jsonl import JsonlTracker, generation_rows
from retrain.types import Completion, Example, Group, Score, StepMetrics

METRICS: StepMetrics = {
    "condition": "maxrl+gtpo_sepa",
    "loss": -0.00123,
    "loss_is_placeholder": False,
    "mean_reward": 0.1875,
    "correct_rate": 0.1875,
    "num_datums": 16,
    "batch_size": 4,
    "group_size": 8,
    "sepa_lambda": 0.0,
    "step_time_s": 45.24,
}


def group(text: str = "x", score: Score | None = None, prompt: Any = "2 + 2?") -> Group:
    completion = Completion(np.arange(3), np.zeros(3), text, "stop")
    return Group(
        Example(prompt, "120"), np.arange(2), (completion,) * 2, (score or Score(1.0, "right"), Score(0.0, "wrong"))
    )


def test_the_step_line_is_the_documented_one() -> None:
    assert step_line(0, METRICS) == (
        "Step 0 [maxrl+gtpo_sepa] | loss=-0.0012 | reward=0.188 | correct=18.8% | datums=16 | bs=4 | gs=8 "
        "| sepa_l=0.0000 | time=45.2s"
    )


@pytest.mark.parametrize(
    ("encoding", "text", "shown"), [("ascii", "4 ×", r"4 \xd7"), ("utf-8", "bad \ud83d half", r"bad \ud83d half")]
)
def test_a_character_that_the_output_cannot_encode_is_escaped_and_the_rest_is_shown(
    encoding: str, text: str, shown: str
) -> None:
    written = BytesIO()
    console = Console(TextIOWrapper(written, encoding=encoding))
    console.print(text)
    console.print("the next line")
    assert written.getvalue().decode() == f"{shown}\nthe next line\n"


def test_a_loss_that_is_reported_late_is_marked() -> None:
    assert "| loss=-0.0012 (placeholder) |" in step_line(3, METRICS | {"loss_is_placeholder": True})


def test_an_evaluation_stands_beside_the_training_rate() -> None:
    line = step_line(3, METRICS | {"eval_pass_at_1": 0.5})
    assert "| correct=18.8% | held-out=50.0% | datums=16 |" in line


def test_a_step_that_scoring_holds_up_says_so_and_names_the_remedy_once() -> None:
    slow = METRICS | {"score_time_s": 11.3, "step_time_s": 45.2}
    assert step_line(0, slow).endswith("| time=45.2s | scoring=25%")
    assert "scoring" not in step_line(0, METRICS | {"score_time_s": 5.0, "step_time_s": 45.2})
    assert "scoring" not in step_line(0, METRICS | {"score_time_s": 0.5, "step_time_s": 0.6})
    stream = StringIO()
    console = Console(stream)
    for step in range(2):
        console.log(step, slow, [])
    assert stream.getvalue().count("[reward] workers") == 1


def test_graded_rewards_that_count_as_wrong_are_explained_once() -> None:
    stream = StringIO()
    console = Console(stream)
    for _ in range(6):
        console.log(0, METRICS | {"correct_rate": 0.0, "mean_reward": 0.4}, [])
    assert stream.getvalue().count("no reward has reached [reward] correct_from so far") == 1
    # One step says little, and neither does any after a correct completion, in training or in an evaluation.
    for more in ({"correct_rate": 0.1}, {"correct_rate": 0.0, "eval_pass_at_1": 0.2}):
        stream = StringIO()
        console = Console(stream)
        console.log(0, METRICS | {"mean_reward": 0.4} | more, [])
        for _ in range(6):
            console.log(0, METRICS | {"correct_rate": 0.0, "mean_reward": 0.4}, [])
        assert "correct_from" not in stream.getvalue()


def test_right_answers_that_a_penalty_makes_wrong_are_explained_although_the_mean_is_negative() -> None:
    said = []
    for value in (0.9, -0.1):
        stream = StringIO()
        scores = (Score(value, "wrong"), Score(-2.0, "wrong"), Score(3.0, "error"))
        console = Console(stream)
        for _ in range(5):
            groups = [replace(group(), scores_G=scores)]
            console.log(0, METRICS | {"correct_rate": 0.0, "mean_reward": -0.5}, groups)
        said.append("no reward has reached [reward] correct_from" in stream.getvalue())
    assert said == [True, False]


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        ({}, "raise [reward] workers (shown once)"),
        (
            {"type": "judge"},
            "all requests to the judge are sent at once, so its speed or its rate limit decides (shown",
        ),
        ({"type": "judge", "judge_concurrency": 2}, "raise [reward] judge_concurrency, unless the judge limits its"),
    ],
)
def test_slow_scoring_is_explained_by_what_decides_its_speed(reward: dict[str, Any], advice: str) -> None:
    stream = StringIO()
    console = Console(stream)
    console.start(build_config({"training": {"batch_size": 2, "group_size": 4}, "reward": reward}, {}, "a.toml"))
    console.log(0, METRICS | {"score_time_s": 11.3, "step_time_s": 45.2}, [group()])
    assert f"scoring holds up the step: {advice}" in stream.getvalue()


def test_where_rewards_hang_more_workers_are_not_suggested() -> None:
    stream = StringIO()
    slow = METRICS | {"score_time_s": 11.3, "step_time_s": 45.2}
    Console(stream).log(0, slow, [group(score=Score(0.0, "timeout", "no result after 5 s"))])
    assert "scoring holds up the step: some of it takes longer than [reward] timeout_s" in stream.getvalue()
    assert "workers" not in stream.getvalue()


def test_a_step_shows_its_first_two_groups() -> None:
    stream = StringIO()
    Console(stream).log(0, METRICS, [group(), group(), group()])
    lines = stream.getvalue().splitlines()
    assert lines[:2] == 2 * ["  group: 1/2 correct | answer=120"]
    assert lines[2].startswith("Step 0 [maxrl+gtpo_sepa] | ")
    assert len(lines) == 3


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_redrawn_on_a_terminal_and_gives_way_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.tracking.console.LIVE_EVERY_S", 0.0)
    stream = Terminal()
    console = Console(stream)
    console.progress("sampling", 3, 8)
    console.progress("sampling", 5, 8)
    console.print("a line")
    console.progress("scoring", 0, 8)
    console.finish()
    shown = stream.getvalue()
    assert "\n" not in shown.split("a line")[0]
    # What a terminal shows in the end: each carriage return starts over at the left.
    assert [line.split(ERASE)[-1] for line in shown.split("\n")] == ["a line", ""]
    assert "5/8" in shown


def test_progress_in_a_pipe_is_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    console = Console(stream)
    console.progress("sampling", 1, 8)
    assert stream.getvalue() == ""
    monkeypatch.setattr("retrain.tracking.console.PLAIN_EVERY_S", 0.0)
    console.progress("sampling", 2, 8)
    assert stream.getvalue() == "  sampling 2/8\n"


@pytest.mark.parametrize("output", ["closed pipe", "closed file", "full device"])
def test_a_console_whose_reader_is_gone_stops_printing(output: str) -> None:
    if output == "full device" and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    reading, writing = os.pipe()
    os.close(reading)
    if output == "full device":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    stream = os.fdopen(writing, "w")
    console = Console(stream)
    if output == "closed file":
        stream.close()
    for step in range(2):
        console.print("a line")
        console.log(step, METRICS, [group()])
    console.finish()
    assert console.stream is None
    # What is left in the buffer cannot be written either, and is not what this is about.
    with contextlib.suppress(OSError):
        stream.close()


def test_a_console_can_do_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("retrain.tracking.console.PLAIN_EVERY_S", 0.0)
    console = Console()
    console.print("a line")
    console.progress("sampling", 1, 2)
    console.log(0, METRICS, [group()])
    console.finish()


@pytest.fixture
def tracker(tmp_path: Path) -> Any:
    made = JsonlTracker(tmp_path)
    made.start(load_config())
    yield made
    made.finish()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_files_exist_from_the_start_and_are_appended_to(tracker: JsonlTracker, tmp_path: Path) -> None:
    assert all((tmp_path / name).exists() for name in FILES if name != DEBUG)
    tracker.log(0, METRICS, [group()])
    tracker.finish()
    tracker.start(load_config())
    tracker.log(1, METRICS, [group()])
    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    assert len(lines(tmp_path / "emergence" / "generations.jsonl")) == 4


def test_completions_are_logged_with_the_reference_and_the_answer_that_was_extracted(tmp_path: Path) -> None:
    for kind, answers in (("match", [{"answer": "12"}] * 2), ("judge", [{}] * 2)):
        made = JsonlTracker(tmp_path / kind)
        made.start(load_config(None, {"reward.type": kind, "reward.judge_model": "m"}))
        made.log(0, METRICS, [group("so \\boxed{12}")])
        made.finish()
        rows = lines(tmp_path / kind / "emergence" / "generations.jsonl")
        assert [row["reference"] for row in rows] == ["120", "120"]
        assert [{key: row[key] for key in row if key == "answer"} for row in rows] == answers


def test_what_is_logged_is_on_disk_at_once(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS, [group()])
    assert lines(tmp_path / "metrics.jsonl") == [METRICS]


def test_numbers_that_json_lacks_become_null(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS | {"loss": float("nan"), "ratio_max": float("-inf"), "correct_rate": 0.5}, [])
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["ratio_max"], row["correct_rate"]) == (None, None, 0.5)


def test_floats_are_written_to_the_last_bit(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS | {"loss": 0.1 + 0.2}, [])
    assert lines(tmp_path / "metrics.jsonl")[0]["loss"] == 0.1 + 0.2


def test_a_failed_score_has_no_reward_but_says_why(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS, [group(score=Score(0.0, "error", "it broke"))])
    first, second = lines(tmp_path / "emergence" / "generations.jsonl")
    assert (first["reward"], first["outcome"], first["detail"]) == (None, "error", "it broke")
    assert second["reward"] == 0.0
    assert "detail" not in second
    assert lines(tmp_path / "emergence" / "steps.jsonl")[0]["total_count"] == 1


def test_chat_prompts_are_written_as_one_text(tracker: JsonlTracker, tmp_path: Path) -> None:
    chat = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"})
    tracker.log(0, METRICS, [group(prompt=chat)])
    assert lines(tmp_path / "emergence" / "generations.jsonl")[0]["prompt"] == "system: be brief\n\nuser: 2 + 2?"


def test_logs_are_cut_back_to_a_checkpoint(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS | {"step": 0}, [group()])
    sizes = tracker.sizes()
    tracker.log(1, METRICS | {"step": 1}, [group()])
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert cut_logs(tmp_path, sizes, 1) == []
    assert {name: (tmp_path / name).stat().st_size for name in FILES if name != DEBUG} == sizes
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(("torn", "left"), [(b'{"step": 0}\n{"st', [0]), (b'{"st', []), (b"", [])])
def test_a_line_torn_before_its_checkpoint_is_cut_too_and_reported_as_lost(
    tmp_path: Path, torn: bytes, left: list[int]
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    short = cut_logs(tmp_path, {"metrics.jsonl": 1000, "eval.jsonl": 10}, 2)
    assert short == ["metrics.jsonl", "eval.jsonl"]
    logged: list[str] = []
    restore_logs(tmp_path, short, 2, "grpo+none", logged.append)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == left
    assert (tmp_path / "eval.jsonl").read_bytes() == b""
    assert len(logged) == 2 and all(line.startswith("Warning: ") for line in logged)


@pytest.mark.parametrize("call", ["log", "sizes"])
def test_a_full_disk_is_reported_in_a_sentence(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = JsonlTracker(tmp_path)
    tracker.start(load_config())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        tracker.log(0, METRICS, []) if call == "log" else tracker.sizes()
    assert caught.value.exit_code == 1
    tracker.finish()


class Listener:
    def __init__(self) -> None:
        self.received: list[str] = []

    def start(self, config: TrainConfig) -> None:
        self.received.append("start")

    def log(self, step: int, metrics: StepMetrics, groups: Any) -> None:
        self.received.append(f"log {step}")

    def finish(self) -> None:
        self.received.append("finish")


def test_several_trackers_are_called_in_turn() -> None:
    listeners = [Listener(), Listener()]
    trackers = Trackers(listeners)
    trackers.start(load_config())
    trackers.log(4, METRICS, [])
    trackers.finish()
    assert [listener.received for listener in listeners] == 2 * [["start", "log 4", "finish"]]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "train/loss"),
        ("mean_reward", "train/rewards/mean_reward"),
        ("correct_rate", "train/rewards/correct_rate"),
        ("running_correct_rate", "train/rewards/running_correct_rate"),
        ("exec_entropy_mean", "train/entropy/exec_mean"),
        ("plan_entropy_var", "train/entropy/plan_var"),
        ("bp_p_star", "train/backpressure/p_star"),
        ("grad_norm", "train/grad_norm"),
    ],
)
def test_metrics_go_to_dashboards_under_their_documented_names(key: str, name: str) -> None:
    assert metric_name(key) == name


@pytest.mark.filterwarnings("ignore:::wandb")
def test_wandb_without_a_key_says_how_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from retrain.tracking.wandb import WandbTracker

    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    tracker = WandbTracker(tmp_path)
    with pytest.raises(ConfigError, match=r"wandb_project = 'tests': No API key.*Try: wandb login, or .*offline"):
        tracker.start(load_config(None, {"logging.wandb_project": "tests"}))
    tracker.finish()
    assert not (tmp_path / "wandb_run_id").exists()


def read_wandb(folder: Path) -> list[Any]:
    """Every record of the offline run below a folder, once wandb's own process has written the last one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records = scan_wandb(folder)
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError("the run did not end")


def scan_wandb(folder: Path) -> list[Any]:
    """The records so far. The files are LevelDB logs of wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        data, at, message = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            message += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(message)
                records.append(record)
                message = b""
    return records


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_an_offline_wandb_run_writes_files_and_continues_under_its_id(tmp_path: Path, offline: None) -> None:
    from retrain.tracking.wandb import WandbTracker

    config = load_config(None, {"logging.wandb_project": "tests", "logging.wandb_tags": "a, b"})
    ids = []
    for step in range(2):
        tracker = WandbTracker(tmp_path)
        tracker.start(config)
        assert tracker.run.name == "maxrl+gtpo_sepa"
        tracker.log(step, METRICS | {"bp_p_star": None}, [])
        tracker.finish()
        ids.append((tmp_path / "wandb_run_id").read_text())
    assert ids[0] == ids[1]
    written = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert written
    assert all(re.search(ids[0], path.name) for path in written)


def test_a_campaigns_run_has_its_names_in_wandb(tmp_path: Path, offline: None) -> None:
    from retrain.config.load import build_config
    from retrain.tracking.wandb import WandbTracker

    tables = {"campaign": {"seeds": [7]}, "logging": {"wandb_project": "tests", "wandb_entity": "us"}}
    run = plan_runs(build_config(tables, {}, "c.toml"), tmp_path, "c.toml")[-1]
    tracker = WandbTracker(tmp_path)
    tracker.start(run.config)
    tracker.log(0, METRICS | {"exec_entropy_mean": 1.5, "bp_sigma": 0.1}, [])
    tracker.finish()
    records = read_wandb(tmp_path)
    (opened,) = (record.run for record in records if record.HasField("run"))
    assert (opened.project, opened.entity) == ("tests", "us")
    assert opened.display_name == "maxrl+gtpo_sepa_s7"
    assert opened.run_group == "maxrl+gtpo_sepa"
    assert sorted(opened.tags) == ["maxrl+gtpo_sepa", "seed7"]
    logged = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        if record.HasField("history")
        for item in record.history.item
    }
    assert logged["train/loss"] == -0.00123
    assert logged["train/rewards/mean_reward"] == 0.1875
    assert logged["train/rewards/correct_rate"] == 0.1875
    assert logged["train/entropy/exec_mean"] == 1.5
    assert logged["train/backpressure/sigma"] == 0.1


@pytest.mark.slow
def test_the_rank_analysis_is_a_run_of_its_own_with_its_table(tmp_path: Path, offline: None) -> None:
    from retrain.tracking.wandb import log_squeeze

    analysis = {
        "run": "grpo+none_s1",
        "source_rank": 2,
        "recommended_rank": 1,
        "ranks": [{"rank": r, "mean": 0.9, "minimum": 0.8, "maximum": 1.0} for r in (1, 2)],
    }
    log_squeeze(load_config(None, {"logging.wandb_project": "tests"}), tmp_path, analysis)
    records = read_wandb(tmp_path)
    (opened,) = (record.run for record in records if record.HasField("run"))
    assert opened.display_name == "squeeze-analysis"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["rank", "mean", "minimum", "maximum"],
        "data": [[1, 0.9, 0.8, 1.0], [2, 0.9, 0.8, 1.0]],
    }


def test_trackio_that_is_not_installed_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.delitem(sys.modules, "retrain.tracking.trackio", raising=False)
    with pytest.raises(MissingExtraError, match=r'needs the package trackio.*pip install -e ".*\[trackio\]"'):
        importlib.import_module("retrain.tracking.trackio")


@pytest.mark.slow
def test_wandb_is_sent_a_table_of_completions(tmp_path: Path, offline: None) -> None:
    from retrain.tracking.background import BackgroundTracker
    from retrain.tracking.wandb import WandbTracker

    config = load_config(None, {"logging.wandb_project": "tests", "logging.log_completions": True})
    tracker = BackgroundTracker("wandb", WandbTracker(tmp_path), print)
    tracker.start(config)
    earned = replace(group("four"), advantages_G=np.array([0.5, -0.5]))
    tracker.log(3, METRICS, [earned, group("x", Score(0.0, "timeout"))])
    tracker.finish()
    read_wandb(tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["step", "prompt", "completion", "reward", "advantage"]
    assert table["data"] == [
        [3, "2 + 2?", "four", 1.0, 0.5],
        [3, "2 + 2?", "four", 0.0, -0.5],
        [3, "2 + 2?", "x", None, None],
        [3, "2 + 2?", "x", 0.0, None],
    ]


def test_completions_wait_to_be_sent_only_where_they_are_wanted() -> None:
    from retrain.tracking.background import BackgroundTracker

    class Waiting(Listener):
        def log(self, step: int, metrics: StepMetrics, groups: Any) -> None:
            self.received.append(f"{step} with {len(groups)}")

    for wanted in (False, True):
        inner = Waiting()
        tracker = BackgroundTracker("test", inner, print)
        tracker.start(load_config(None, {"logging.log_completions": wanted}))
        tracker.log(1, METRICS, [group()])
        tracker.finish()
        assert inner.received == ["start", f"1 with {int(wanted)}", "finish"]


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 3, 5]), (0, [])])
def test_a_tracker_gets_every_nth_step_and_evaluations(every: int, steps: list[int]) -> None:
    inner = Listener()
    tracker = ThrottledTracker(every, inner)
    tracker.start(load_config())
    for step in range(6):
        tracker.log(step, METRICS | ({"eval_pass_at_1": 0.5} if step == 3 else {}), [])
    tracker.finish()
    assert inner.received == ["start", *(f"log {step}" for step in steps), "finish"]


def _kept(folder: Path, share: float, seed: int = 0, steps: int = 400) -> list[int]:
    options = {"logging.save_completions_probability": share, "training.seed": seed}
    tracker = JsonlTracker(folder)
    tracker.start(load_config(None, options))
    for step in range(steps):
        tracker.log(step, METRICS, [group()])
    tracker.finish()
    lines = (folder / "emergence/generations.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["step"] for line in lines})


def test_the_share_of_steps_with_completions_is_as_asked(tmp_path: Path) -> None:
    assert _kept(tmp_path / "none", 0.0, steps=20) == []
    assert _kept(tmp_path / "all", 1.0, steps=20) == list(range(20))
    some = _kept(tmp_path / "some", 0.25)
    # A binomial of 400 and 0.25 lies within 100 ± 5 standard deviations.
    assert 57 <= len(some) <= 143
    assert some == _kept(tmp_path / "again", 0.25) != _kept(tmp_path / "other", 0.25, seed=1)


def test_debugging_writes_what_became_of_every_completion(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start(load_config(None, {"logging.debug": True}))
    earned = replace(group("four", Score(0.0, "timeout")), advantages_G=np.array([0.0, 0.0]))
    equal = replace(group("x", Score(0.0, "wrong")), advantages_G=np.array([0.0, 0.0]))
    live = replace(group("y"), advantages_G=np.array([0.5, -0.5]))
    tracker.log(2, METRICS | {"ratio_mean": 1.01, "kl_ref": 0.2}, [earned, equal, live])
    assert tracker.sizes()[DEBUG] == (tmp_path / DEBUG).stat().st_size
    tracker.finish()
    (row,) = [json.loads(line) for line in (tmp_path / DEBUG).read_text().splitlines()]
    assert (row["step"], row["ratio_mean"], row["kl_ref"]) == (2, 1.01, 0.2)
    assert [found["dropped"] for found in row["groups"]] == [
        {"0": "scoring: timeout", "1": "all rewards of the group are equal"},
        {"0": "all rewards of the group are equal", "1": "all rewards of the group are equal"},
        {},
    ]
    assert row["groups"][0]["rewards"] == [None, 0.0] and row["groups"][2]["advantages"] == [0.5, -0.5]
    assert row["groups"][2]["lengths"] == [3, 3] and row["groups"][2]["prompt_tokens"] == 2
    cut_logs(tmp_path, {}, 1)
    assert (tmp_path / DEBUG).read_text() == ""


def test_a_file_that_the_checkpoint_does_not_know_keeps_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / DEBUG
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 5}\n{"st')
    assert cut_logs(tmp_path, {}, 4) == []
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    assert cut_logs(tmp_path, {}, 4) == []
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_with_a_penalty_a_group_of_equal_rewards_is_not_called_dropped(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start(load_config(None, {"logging.debug": True, "kl.beta": 0.1}))
    tracker.log(0, METRICS, [group("x", Score(0.0, "wrong")), group("y", Score(0.0, "timeout"))])
    tracker.finish()
    row = json.loads((tmp_path / DEBUG).read_text())
    assert [found["dropped"] for found in row["groups"]] == [{}, {"0": "scoring: timeout"}]


def test_without_debugging_there_is_no_such_file(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(0, METRICS, [group()])
    assert not (tmp_path / DEBUG).exists()


def test_the_terms_of_a_weighted_reward_are_logged_with_each_completion() -> None:
    ids = np.arange(2)
    completions = tuple(Completion(ids, ids.astype(np.float32), text, "stop") for text in ("a", "b"))
    scores = (WeightedScore(0.7, "right", terms={"math": 1.0, "brevity": -0.3}), Score(0.0, "error", "broken"))
    first, second = generation_rows(3, Group(Example("2+2", "4"), ids, completions, scores))
    assert first["terms"] == {"math": 1.0, "brevity": -0.3} and first["reward"] == 0.7
    assert "terms" not in second


def test_what_is_not_finite_and_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start(load_config(None, {"logging.debug": True, "logging.save_completions_probability": 1.0}))
    metrics = METRICS | {"ratio_max": math.nan, "loss": math.nan, "grad_norm": math.inf}
    tracker.log(0, metrics, [group(text="\ud800")])
    tracker.finish()
    for name in (METRICS_FILE, DEBUG, GENERATIONS):
        (row,) = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()][:1]
        assert row.get("loss") is None
