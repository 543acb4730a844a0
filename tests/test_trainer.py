from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.fakes import Play
from e2e.runs import fake_config, rows, rows_without_times, run_command, train_quietly, write_problems
from e2e.tiny import write_tokenizer

from retrain import trainer
from retrain.advantages import AlgorithmContext
from retrain.analysis.measure import measure
from retrain.analysis.runs import find_runs
from retrain.assemble import Overrides, assemble
from retrain.campaign.progress import read_progress
from retrain.cli import run
from retrain.data import ExampleOrder
from retrain.errors import BackendError, CheckpointError, ConfigError, PluginError, RolloutError
from retrain.report import collect
from retrain.runtime.control import StopRequested
from retrain.runtime.interrupts import Interrupts
from retrain.storage.recording import read_recordings
from retrain.testing import FakeBackend
from retrain.tracking.console import Console
from retrain.types import FloatArray, IntArray, StepMetrics
from tests.cases import slow
from tests.rewards.judge_server import JudgeServer, completion

LOGGING_PAGE = re.findall(
    r"`([\w/]+)`", (Path(__file__).parents[1] / "docs" / "logging.md").read_text(encoding="utf-8")
)
DOCUMENTED_KEYS = [
    "step",
    "condition",
    "loss",
    "loss_is_placeholder",
    "mean_reward",
    "correct_rate",
    "running_correct_rate",
    "sepa_lambda",
    "sepa_gate_open",
    "num_datums",
    "max_token_hit_rate",
    "prompt_tokens_mean",
    "step_time_s",
    "sample_time_s",
    "score_time_s",
    "train_time_s",
    "tokens_per_s",
    "batch_size",
    "group_size",
    "groups_sampled",
    "groups_all_right",
    "groups_all_wrong",
    "reward_errors",
    "bp_action",
    "bp_regime",
    "bp_p_star",
    "bp_sigma",
    "bp_kappa",
    "bp_utilization",
    "bp_throughput",
    "uncertainty_kind",
    "exec_entropy_mean",
    "exec_entropy_var",
    "plan_entropy_mean",
    "plan_entropy_var",
    "ratio_mean",
    "ratio_max",
    "kl_sample_train",
    "grad_norm",
]
EVAL_KEYS = ("eval_pass_at_1", "eval_pass_at_k", "eval_ci_low", "eval_ci_high", "eval_reward_errors", "eval_time_s")

Rows = list[dict[str, Any]]

STEP_LINE = re.compile(
    r"Step \d+ \[maxrl\+gtpo_sepa\] \| loss=-?\d+\.\d{4} \| reward=\d\.\d{3} \| correct=\d+\.\d% "
    r"\| datums=\d+ \| bs=2 \| gs=4 \| sepa_l=\d\.\d{4} \| time=\d+\.\ds"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer is all the fake backend's model has."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def uncut(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The metrics of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uncut")
    train_quietly(fake_config(model, folder))
    Play.calls = 0
    return rows_without_times(folder / "logs")


@pytest.fixture(autouse=True)
def play() -> Iterator[type[Play]]:
    """The fake backend, as it was before each test."""
    kept = {name: value for name, value in vars(Play).items() if not name.startswith("__")}
    Play.calls, Play.trained, Play.prompts = 0, [], []
    yield Play
    for name, value in kept.items():
        setattr(Play, name, value)


def always(text: str) -> staticmethod:
    return staticmethod(lambda prompt, index, rng: text)


def by_index(*texts: str) -> staticmethod:
    return staticmethod(lambda prompt, index, rng: texts[index % len(texts)])


def write_held_out(folder: Path) -> Path:
    (folder / "held_out").mkdir()
    return write_problems(folder / "held_out")


def test_a_run_writes_every_documented_file_and_key(model: Path, tmp_path: Path) -> None:
    config = fake_config(model, tmp_path, eval__every=2, eval__source="jsonl", eval__path=str(write_held_out(tmp_path)))
    result, _ = train_quietly(config)
    logs = tmp_path / "logs"
    metrics = rows(logs)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    for row in metrics:
        assert set(DOCUMENTED_KEYS) <= row.keys()
        undocumented = {key for key in row if key not in LOGGING_PAGE and not key.startswith("bp_")}
        assert not undocumented, "docs/logging.md lacks them"
        assert (set(EVAL_KEYS) <= row.keys()) == (row["step"] % 2 == 0)
        assert row["condition"] == "maxrl+gtpo_sepa"
        assert (row["batch_size"], row["group_size"], row["loss_is_placeholder"]) == (2, 4, False)
        assert row["running_correct_rate"] == pytest.approx(
            np.mean([r["correct_rate"] for r in metrics[: row["step"] + 1]])
        )
    steps = rows(logs, "emergence/steps.jsonl")
    assert [set(row) for row in steps] == 4 * [{"step", "mean_reward", "correct_count", "total_count", "condition"}]
    assert [row["total_count"] for row in steps] == [8, 8, 8, 8]
    generations = rows(logs, "emergence/generations.jsonl")
    assert len(generations) == 32
    assert {"step", "prompt", "completion", "reward", "num_tokens"} <= generations[0].keys()
    assert all(row["num_tokens"] == len(row["completion"]) for row in generations)
    assert [row["step"] for row in rows(logs, "eval.jsonl")] == [0, 2, 4]
    problems = rows(logs, "eval_problems.jsonl")
    assert len(problems) == len(rows(logs, "eval.jsonl")[0]["counted"]) and problems[0]["prompt"]
    state = json.loads((logs / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (4, "finished")
    assert (logs / state["checkpoint"] / "checkpoint.json").exists()
    assert (tmp_path / "adapter" / "steps.txt").read_text() == "4"
    assert result.steps == 4
    assert result.last_evaluation is not None


def test_the_lines_of_a_run_are_the_documented_ones(model: Path, tmp_path: Path) -> None:
    _, printed = train_quietly(fake_config(model, tmp_path, sepa__delay_steps=2))
    lines = printed.splitlines()
    assert lines[:7] == [
        f"Loading tokenizer for {model} ...",
        "Loading vocabulary table...",
        "Vocabulary table: 128 entries",
        "Loading dataset...",
        "Loaded 7 examples",
        "Pre-encoded 7 prompts",
        "LocalTrainHelper ready (engine=scripted, split_mode=False).",
    ]
    assert len(lines) == 7 + 4 * 3
    for at in range(7, len(lines), 3):
        assert re.fullmatch(r"  group: [0-4]/4 correct \| answer=\d", lines[at])
        assert re.fullmatch(r"  group: [0-4]/4 correct \| answer=\d", lines[at + 1])
        assert STEP_LINE.fullmatch(lines[at + 2]), lines[at + 2]


def test_the_groups_shown_are_those_of_the_first_two_prompts_dead_or_not(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    sampled: list[str] = []

    def dead_before_live(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
        sampled.append("right" if len(sampled) == 9 else "wrong")
        return sampled[-1]

    play.script = staticmethod(dead_before_live)
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__batch_size=3))
    assert [line[:20] for line in printed.splitlines() if "group:" in line] == 2 * ["  group: 0/4 correct"]
    logged = rows(tmp_path / "logs", "emergence/generations.jsonl")
    rights = [sum(row["outcome"] == "right" for row in logged[at : at + 4]) for at in (0, 4, 8)]
    assert rights == [1, 0, 0], "in the order of training and of recordings"


def test_whole_texts_are_kept_and_control_characters_survive(model: Path, tmp_path: Path, play: type[Play]) -> None:
    text = 'right \x85\x1c\n\t"quoted" é \U0001f600 ' + "x" * 5000
    play.script, play.context_length = always(text), 10_000
    train_quietly(
        fake_config(model, tmp_path, training__max_steps=1, training__max_tokens=9000, training__batch_size=1)
    )
    assert {row["completion"] for row in rows(tmp_path / "logs", "emergence/generations.jsonl")} == {text}


def test_an_all_wrong_batch_trains_on_nothing_and_is_counted(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = always("no idea")
    train_quietly(fake_config(model, tmp_path, training__max_steps=2))
    for row in rows(tmp_path / "logs"):
        assert (row["num_datums"], row["groups_all_wrong"], row["groups_all_right"]) == (0, 2, 0)
        assert (row["correct_rate"], row["mean_reward"], row["loss"]) == (0.0, 0.0, 0.0)
    assert play.trained == [[], []]


def test_an_all_right_batch_is_counted_apart(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = always("right")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    (row,) = rows(tmp_path / "logs")
    assert (row["num_datums"], row["groups_all_wrong"], row["groups_all_right"]) == (0, 0, 2)


def test_a_reward_that_raises_for_some_is_masked_and_counted(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "raise", "wrong", "wrong")
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=2))
    for row in rows(tmp_path / "logs"):
        assert row["reward_errors"] == 2
        assert row["correct_rate"] == pytest.approx(1 / 3)
        assert row["num_datums"] == 6
    for datums in play.trained:
        texts = ["".join(map(chr, datum.completion_ids_T)) for datum in datums]
        assert texts == 2 * ["right", "wrong", "wrong"]
        # Centred over the three that count.
        signs = [float(np.sign(datum.advantages_T[0])) for datum in datums]
        assert signs == 2 * [1.0, -1.0, -1.0]
    assert printed.count("Scoring failed for 2 of 8 completions; they are excluded. The first one:") == 1
    assert printed.count('raise ValueError("this response is cursed")') == 1, "its traceback, once"
    failed = [row for row in rows(tmp_path / "logs", "emergence/generations.jsonl") if row["reward"] is None]
    assert len(failed) == 4
    assert all(row["outcome"] == "error" and "this response is cursed" in row["detail"] for row in failed)


def test_a_reward_that_raises_in_an_evaluation_is_reported_as_such(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    play.script = by_index("right", "raise", "wrong", "wrong")
    held_out = {"eval__every": 2, "eval__path": str(write_held_out(tmp_path)), "eval__samples": 2}
    config = fake_config(model, tmp_path, training__max_steps=2, **held_out)
    _, printed = train_quietly(config)
    failed = [line.partition(";")[0] for line in printed.splitlines() if line.startswith("Scoring failed for ")]
    place = "in the evaluation on held-out problems"
    assert failed == [f"Scoring failed for 7 of 14 completions {place}", "Scoring failed for 2 of 8 completions"]
    assert [row["eval_reward_errors"] for row in rows(tmp_path / "logs", "eval.jsonl")] == [7, 7]
    check = next(check for check in read_progress(tmp_path / "logs").health if check.name == "reward errors")
    assert (check.level, check.step) == ("problem", 0)
    assert check.value == "25% of scores failed, 50% in the newest evaluation"
    play.script = always("raise")
    with pytest.raises(RolloutError, match="failed for 14 of 14 completions in the evaluation on held-out"):
        train_quietly(config)


def test_a_reward_that_raises_for_most_stops_the_run_with_a_checkpoint(
    model: Path, tmp_path: Path, play: type[Play], capsys: pytest.CaptureFixture[str]
) -> None:
    def break_the_second_step(call: int) -> None:
        if call == 2:
            play.script = by_index("raise", "raise", "raise", "right")

    play.before_generate = staticmethod(break_the_second_step)
    assert run_command(fake_config(model, tmp_path)) == 1
    printed = capsys.readouterr().err
    assert "scoring failed for 6 of 8 completions (error: ValueError: this response is cursed)" in printed
    assert printed.endswith(f"To resume: retrain --resume {tmp_path / 'logs'}\n"), "below the error"
    assert (tmp_path / "logs" / "checkpoints" / "step_000001" / "checkpoint.json").exists()
    play.script = by_index("right", "wrong")
    play.before_generate = staticmethod(lambda call: None)
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert [row["step"] for row in rows(tmp_path / "logs")] == [0, 1, 2, 3]


def test_a_run_that_fails_before_its_first_step_leaves_the_adapter_of_an_earlier_one(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    train_quietly(fake_config(model, tmp_path))
    trained = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    play.script = always("raise")
    assert run_command(fake_config(model, tmp_path, logging__log_dir=str(tmp_path / "second"))) == 1
    assert trained and {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == trained


def test_a_constant_half_is_no_right_answer(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = always("half")
    config = fake_config(model, tmp_path, training__max_steps=1)
    _, printed = train_quietly(config)
    (row,) = rows(tmp_path / "logs")
    assert (row["mean_reward"], row["correct_rate"], row["groups_all_wrong"]) == (0.5, 0.0, 2)
    assert "group: 0/4 correct" in printed
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1, reward__correct_from=0.5))
    assert "group: 4/4 correct" in printed


def test_a_reward_that_does_not_apply_to_most_leaves_them_out(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "skip", "wrong", "skip", "skip", "skip")
    config = {"reward__custom_function": "score_some", "training__group_size": 6}
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=2, **config))
    for row in rows(tmp_path / "logs"):
        assert (row["reward_errors"], row["num_datums"], row["correct_rate"]) == (0, 4, 0.5)
        assert row["rewards_none"] == 8
    assert "failed" not in printed
    assert printed.count("The reward returned None for 8 of 12 completions. They count in no rate") == 1
    assert "  group: 1/6 correct | answer=0 | 4 without a score\n" in printed
    assert [row["outcome"] for row in rows(tmp_path / "logs", "emergence/generations.jsonl")][:3] == [
        "right",
        "none",
        "wrong",
    ]
    play.script = always("skip")
    with pytest.raises(RolloutError, match="the reward returned None for all 12 completions"):
        train_quietly(fake_config(model, tmp_path, **config))


def test_a_score_of_an_evaluation_counts_after_a_resume(model: Path, tmp_path: Path, play: type[Play]) -> None:
    """Steps without a score are accepted once something was scored, before and after a resume."""
    texts = chain(repeat("right", 14), repeat("skip"))
    play.script = staticmethod(lambda prompt, index, rng: next(texts))
    own = {"reward__custom_function": "score_some", "training__batch_size": 1, "eval__samples": 2}
    own |= {"eval__every": 5, "eval__path": str(write_held_out(tmp_path))}
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, **own))
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs"), training__max_steps=2, **own))
    assert [row["correct_rate"] for row in rows(tmp_path / "logs")] == [None, None]


def test_a_step_in_which_nothing_is_scored_has_no_rate(model: Path, tmp_path: Path, play: type[Play]) -> None:
    logs = [tmp_path / mode for mode in ("grpo", "maxrl")]
    for log_dir in logs:
        texts = chain.from_iterable(repeat(text, 4) for text in cycle(("right", "skip")))
        play.script = staticmethod(lambda prompt, index, rng, texts=texts: next(texts))
        own = {"logging__log_dir": str(log_dir), "algorithm__advantage_mode": log_dir.name}
        own |= {"reward__custom_function": "score_some", "training__batch_size": 1}
        _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=4, **own))
        found = [(row["mean_reward"], row["correct_rate"], row["running_correct_rate"]) for row in rows(log_dir)]
        assert found == [(1.0, 1.0, 1.0), (None, None, 1.0)] * 2
        assert "reward=none | correct=none" in printed and "no completion was scored, so nothing was learned" in printed
        # Rows that are rebuilt have none, either.
        (log_dir / "metrics.jsonl").unlink()
        train_quietly(fake_config(model, tmp_path, training__max_steps=5, resume__from=str(log_dir), **own))
        assert [row["correct_rate"] for row in rows(log_dir)] == [1.0, None, 1.0, None, 1.0]
        # A resume may begin with such a step, as the uninterrupted run did.
        train_quietly(fake_config(model, tmp_path, training__max_steps=6, resume__from=str(log_dir), **own))
        assert rows(log_dir)[-1]["correct_rate"] is None
    measured = measure(find_runs(logs), "correct_rate")
    assert {rate for values in measured.values.values() for rate in values.values()} == {1.0}
    assert "Steps of them without a correct_rate: grpo 3, maxrl 3." in measured.notes
    assert measure(find_runs(logs), "correct_rate", last=1).step == 4, "later, there is none"
    shown = collect([tmp_path])["verdict"]
    assert (shown["step"], shown["baseline_mean"], shown["notes"][-1]) == (5, 1.0, f"Note: {measured.notes[-1]}")
    alone = collect(logs[:1])
    assert "3 of 6 steps have no score and are left out." in alone["verdict"]["sentence"]
    (check,) = [check for check in alone["runs"][0]["health"] if check["name"] == "reward errors"]
    assert check["value"] == "0% of scores failed, 50% of rewards are None"


def test_a_negative_reward_ends_a_run_with_maxrl_before_it_is_trained_on(
    model: Path, tmp_path: Path, play: type[Play], capsys: pytest.CaptureFixture[str]
) -> None:
    play.script = by_index("right", "wrong")
    config = fake_config(model, tmp_path, reward__custom_function="score_sign")
    assert run_command(config) == 2
    printed = capsys.readouterr().err
    assert 'advantage_mode = "maxrl" divides by the mean reward' in printed
    assert 'Try: advantage_mode = "grpo", or add a constant to every reward' in printed
    assert play.trained == []
    assert run_command(config, "--advantage-mode", "grpo") == 0
    assert len(play.trained) == 4


def test_a_reward_that_hangs_is_timed_out_and_masked(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "hang", "wrong", "wrong")
    config = fake_config(
        model, tmp_path, training__max_steps=1, training__batch_size=1, reward__timeout_s=0.5, reward__workers=1
    )
    train_quietly(config)
    (row,) = rows(tmp_path / "logs")
    assert (row["reward_errors"], row["num_datums"]) == (1, 3)
    outcomes = [row["outcome"] for row in rows(tmp_path / "logs", "emergence/generations.jsonl")]
    assert outcomes == ["right", "timeout", "wrong", "wrong"]


def test_a_reward_that_is_not_a_number_is_an_error(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "nan", "wrong", "wrong")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    (row,) = rows(tmp_path / "logs")
    assert (row["reward_errors"], row["num_datums"], row["mean_reward"]) == (2, 6, pytest.approx(1 / 3))


def test_empty_completions_train_on_nothing_of_theirs(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "", "wrong", "")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    (row,) = rows(tmp_path / "logs")
    assert row["num_datums"] == 4
    assert row["correct_rate"] == 0.25


def test_only_empty_completions_are_survived(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = always("")
    train_quietly(fake_config(model, tmp_path, training__max_steps=2, training__record=True))
    assert [row["num_datums"] for row in rows(tmp_path / "logs")] == [0, 0]


def test_a_loss_that_is_not_a_number_is_logged_as_none_and_the_run_continues(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    play.outcome = {"loss": float("nan"), "ratio_max": float("inf"), "grad_norm": None, "skipped": 1}
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=2))
    metrics = rows(tmp_path / "logs")
    assert [row["loss"] for row in metrics] == [None, None]
    assert [row["ratio_max"] for row in metrics] == [None, None]
    assert [row["skipped_steps"] for row in metrics] == [1, 2]
    assert "| loss=nan |" in printed


@pytest.mark.parametrize("backend", ["e2e.fakes.build", "e2e.fakes.build_settling"])
def test_every_metric_that_a_backend_reports_is_logged(
    model: Path, tmp_path: Path, play: type[Play], backend: str
) -> None:
    play.outcome = {"experts_used": 7}
    train_quietly(fake_config(model, tmp_path, backend__backend=backend, training__max_steps=3))
    metrics = rows(tmp_path / "logs")
    assert [(row["step"], row["experts_used"]) for row in metrics] == [(0, 7), (1, 7), (2, 7)]
    assert not any("skipped" in row for row in metrics)


class StopAfter:
    """A RunControl that stops a run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seen: list[tuple[int, int]] = []

    def should_stop(self) -> bool:
        return len(self.seen) == self.steps

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        self.seen.append((step, int(metrics["num_datums"] or 0)))


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_control_sees_every_step_and_can_stop_the_run(
    model: Path, uncut: Rows, tmp_path: Path, every: int
) -> None:
    control, config = StopAfter(3), fake_config(model, tmp_path, logging__every=every)
    with pytest.raises(StopRequested):
        train_quietly(config, overrides=Overrides(control=control))
    assert control.seen == [(row["step"], row["num_datums"]) for row in uncut[:3]]
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (3, "interrupted")
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


def test_tokens_beyond_the_tokenizer_are_survived(model: Path, tmp_path: Path, play: type[Play]) -> None:
    # Models round their vocabulary up; these characters' codes lie past the tokenizer's 128.
    play.script = by_index("right é", "wrong ü")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, algorithm__transform_mode="gtpo_hicra"))
    assert rows(tmp_path / "logs")[0]["num_datums"] == 8


def test_completions_cut_at_the_limit_are_counted(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = by_index("right", "wrong but much too long")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__max_tokens=10))
    assert rows(tmp_path / "logs")[0]["max_token_hit_rate"] == 0.5


def test_every_request_to_a_judge_is_counted_where_it_was_caused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    held_out = {"eval__every": 3, "eval__source": "jsonl", "eval__path": str(write_held_out(tmp_path))}
    with JudgeServer(lambda body: completion("no")) as server:
        judge = {"reward__type": "judge", "reward__judge_base_url": server.url, "reward__judge_cache": ""}
        train_quietly(fake_config(model, tmp_path, reward__custom_module="", **judge, **held_out))
    steps, evaluations = rows(tmp_path / "logs"), rows(tmp_path / "logs", "eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 4]
    assert all(row["eval_judge_requests"] + row["eval_judge_cached"] for row in evaluations)
    counted = sum(row["judge_requests"] for row in steps) + sum(row["eval_judge_requests"] for row in evaluations)
    assert counted == len(server.bodies)
    assert steps[3]["eval_judge_requests"] == evaluations[1]["eval_judge_requests"]


def test_dead_groups_are_replaced_by_fresh_prompts(model: Path, tmp_path: Path, play: type[Play]) -> None:
    def only_odd(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
        number = int("".join(map(chr, prompt)).split()[2].rstrip("?="))
        return "right" if index == 0 and number % 2 else "wrong"

    play.script = staticmethod(only_odd)
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__resample_dead_groups=10))
    (row,) = rows(tmp_path / "logs")
    assert row["num_datums"] == 8, "two live groups of four, whatever it took to find them"
    assert play.calls > 1
    asked = ["".join(map(chr, prompt)) for prompts in play.prompts for prompt in prompts]
    assert len(asked) == row["groups_sampled"] == 2 + row["groups_all_wrong"]


def test_fresh_prompts_are_not_drawn_for_ever(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.script = always("wrong")
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__resample_dead_groups=3))
    assert play.calls == 4
    assert rows(tmp_path / "logs")[0]["groups_all_wrong"] == 8


def test_recorded_rollouts_read_back_as_they_were(model: Path, tmp_path: Path) -> None:
    train_quietly(fake_config(model, tmp_path, training__record=True, training__max_tokens=18))
    recorded = dict(read_recordings(tmp_path / "logs"))
    assert sorted(recorded) == [0, 1, 2, 3]
    generations = rows(tmp_path / "logs", "emergence/generations.jsonl")
    for step, groups in recorded.items():
        flat = [(c, s) for group in groups for c, s in zip(group.completions_G, group.scores_G, strict=True)]
        assert [(c.text, s.value) for c, s in flat] == [
            (row["completion"], row["reward"]) for row in generations if row["step"] == step
        ]
        assert {c.finish_reason for c, _ in flat} == {"length"}


def test_a_tokenizer_without_a_chat_template_is_warned_of_and_given_plain_text(
    tmp_path: Path, play: type[Play]
) -> None:
    bare = write_tokenizer(tmp_path / "bare", chat_template=None)
    _, printed = train_quietly(fake_config(bare, tmp_path, training__max_steps=1))
    assert "Warning: the tokenizer has no chat template; prompts are given to the model as plain text." in printed
    assert all("".join(map(chr, prompt)).endswith("?") for prompt in play.prompts[0])


def test_prompts_that_do_not_fit_the_context_are_rejected_before_sampling(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    play.context_length = 70
    with pytest.raises(
        ConfigError, match=r"max_tokens = 64 and prompts of up to 11 tokens in \[data\] .*Try: max_tokens = 59"
    ):
        train_quietly(fake_config(model, tmp_path))
    play.context_length = 10
    with pytest.raises(ConfigError, match=r"context of 10\.  Try: max_prompt_tokens = 4"):
        train_quietly(fake_config(model, tmp_path, training__max_tokens=6))
    with pytest.raises(ConfigError, match=r"context of 10\.  Try: max_tokens = 5 and max_prompt_tokens = 5"):
        train_quietly(fake_config(model, tmp_path))
    assert play.calls == 0


def test_max_prompt_tokens_cuts_from_the_left(model: Path, tmp_path: Path, play: type[Play]) -> None:
    play.context_length = 70
    train_quietly(fake_config(model, tmp_path, training__max_steps=1, training__max_prompt_tokens=6))
    for prompt in play.prompts[0]:
        assert re.fullmatch(r"is \d\?=", "".join(map(chr, prompt)))
    assert rows(tmp_path / "logs")[0]["prompt_tokens_mean"] == 6.0


def test_a_model_that_does_not_exist_says_how_to_point_at_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_command(fake_config(Path("nobody/has-this-model"), tmp_path)) == 2
    printed = capsys.readouterr().err
    assert '[model] model = "nobody/has-this-model": no such folder' in printed
    assert 'model = "path/to/model"' in printed


def test_an_engine_without_entropies_is_rejected_where_they_are_needed(
    model: Path, tmp_path: Path, play: type[Play]
) -> None:
    play.gives_entropies = False
    with pytest.raises(ConfigError, match="needs the entropy of every token"):
        train_quietly(fake_config(model, tmp_path, algorithm__uncertainty_kind="shannon_entropy"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_while_sampling_saves_at_once_and_can_be_resumed(
    model: Path,
    uncut: Rows,
    tmp_path: Path,
    play: type[Play],
    number: signal.Signals,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play.before_generate = staticmethod(lambda call: os.kill(os.getpid(), number) if call == 2 else None)
    assert run_command(fake_config(model, tmp_path)) == 130
    logs = tmp_path / "logs"
    assert f"To resume: retrain --resume {logs}" in capsys.readouterr().err
    state = json.loads((logs / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (1, "interrupted")
    assert run_command(fake_config(model, tmp_path), "--resume", str(logs)) == 0
    assert rows_without_times(logs) == uncut


def test_a_signal_while_loading_ends_the_run_as_later_ones_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("retrain.assemble.vocabulary_texts", load)
    assert run_command(fake_config(model, tmp_path)) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_second_signal_waits_until_the_first_has_saved(
    model: Path, tmp_path: Path, play: type[Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = FakeBackend.save

    def save(self: FakeBackend, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved(self, path)

    monkeypatch.setattr(FakeBackend, "save", save)
    play.before_generate = staticmethod(lambda call: os.kill(os.getpid(), signal.SIGINT) if call == 2 else None)
    assert run_command(fake_config(model, tmp_path)) == 130
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (1, "interrupted")
    assert (tmp_path / "logs" / state["checkpoint"] / "checkpoint.json").exists()
    assert (tmp_path / "adapter" / "steps.txt").read_text() == "1"


def test_a_second_signal_right_after_the_first_still_gives_the_problems_back(
    model: Path, uncut: Rows, tmp_path: Path, play: type[Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back = ExampleOrder.load_state_dict

    def strike_again(self: ExampleOrder, state: dict[str, int]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        give_back(self, state)

    play.before_generate = staticmethod(lambda call: os.kill(os.getpid(), signal.SIGINT) if call == 2 else None)
    with monkeypatch.context() as patch:
        patch.setattr(ExampleOrder, "load_state_dict", strike_again)
        with pytest.raises(KeyboardInterrupt):
            train_quietly(fake_config(model, tmp_path))
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


def strike_soon(times: int) -> None:
    """Signals from outside, one after the other."""
    strikes = times * f"sleep 0.1; kill -INT {os.getpid()}; "
    subprocess.Popen(["sh", "-c", f"({strikes}) &"]).wait()


def test_the_third_signal_ends_even_a_training_step_that_hangs(model: Path, tmp_path: Path, play: type[Play]) -> None:
    def hang(step: int) -> None:
        if step == 3:
            strike_soon(3)
            time.sleep(60)

    play.before_train = staticmethod(hang)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train_quietly(fake_config(model, tmp_path))
    assert time.monotonic() - began < 30
    assert [p.name for p in (tmp_path / "logs" / "checkpoints").iterdir()] == ["step_000002"], "nothing half done"


def sleepy(context: AlgorithmContext) -> list[FloatArray]:
    """An algorithm plugin that takes for ever."""
    strike_soon(1)
    time.sleep(60)
    raise AssertionError("it was left to sleep")


def test_one_signal_ends_an_algorithm_that_hangs_and_saves(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_quietly(fake_config(model, tmp_path, algorithm__algorithm_mode="test_trainer.sleepy"))
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (0, "interrupted")
    assert rows(tmp_path / "logs") == []


@pytest.mark.parametrize("culprit", ["engine", "advantage"])
def test_a_plain_error_before_training_saves_the_step_it_came_in(
    culprit: str,
    model: Path,
    uncut: Rows,
    tmp_path: Path,
    play: type[Play],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from retrain.advantages import episode

    maxrl = episode.maxrl

    def fail_once(call: int) -> None:
        if call == 2:
            raise RuntimeError("out of luck")

    def fail_at_its_place(rewards_G: FloatArray) -> FloatArray:
        fail_once(play.calls)
        return maxrl(rewards_G)

    if culprit == "engine":
        play.before_generate = staticmethod(fail_once)
    else:
        monkeypatch.setattr(episode, "maxrl", fail_at_its_place)
    if culprit == "engine":
        with pytest.raises(RuntimeError, match="out of luck") as raised:
            run_command(fake_config(model, tmp_path))
        assert raised.value.__notes__ == [f"To resume: retrain --resume {tmp_path / 'logs'}"], "below the traceback"
    else:
        with pytest.raises(PluginError, match="out of luck"):
            train_quietly(fake_config(model, tmp_path))
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["step"], state["status"]) == (1, "failed")
    assert "out of luck" in state["error"] and "\n" not in state["error"]
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


@pytest.mark.parametrize(("fails_at", "saved"), [(0, None), (3, 2)])
def test_an_error_in_a_training_step_is_recorded_beside_the_last_checkpoint(
    fails_at: int, saved: int | None, model: Path, tmp_path: Path, play: type[Play], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: int) -> None:
        if step == fails_at:
            raise RuntimeError("CUDA error\nmore of it")

    play.before_train = staticmethod(fail)
    with pytest.raises(RuntimeError) as raised:
        run_command(fake_config(model, tmp_path))
    state = json.loads((tmp_path / "logs" / "trainer_state.json").read_text())
    assert (state["status"], state["error"]) == ("failed", "RuntimeError: CUDA error")
    assert state.get("step") == saved
    assert hasattr(raised.value, "__notes__") == (saved is not None), "there is something to resume"
    capsys.readouterr()
    assert run(["status", str(tmp_path / "logs")]) == 0
    printed = capsys.readouterr().out
    assert "logs failed: RuntimeError: CUDA error\n" in printed
    assert ("To resume" in printed) == (saved is not None)


def test_a_checkpoint_that_cannot_be_saved_does_not_hide_what_ended_the_run(
    model: Path, tmp_path: Path, play: type[Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: int) -> None:
        if call == 2:
            raise RolloutError("no answer for 300 s")

    def save(backend: FakeBackend, path: Path) -> None:
        raise BackendError("no answer for 15 s")

    play.before_generate = staticmethod(fail)
    monkeypatch.setattr(FakeBackend, "save", save)
    printed = StringIO()
    with pytest.raises(RolloutError, match="no answer for 300 s"):
        trainer.train(fake_config(model, tmp_path), console=Console(printed))
    assert "Warning: no checkpoint of step 1 could be saved: no answer for 15 s\n" in printed.getvalue()


@pytest.mark.parametrize("output", ["closed pipe", "full device", "none at all"])
def test_a_closed_output_does_not_end_a_run(
    output: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if output == "none at all":
        monkeypatch.setattr(sys, "stdout", None)
        assert run_command(fake_config(model, tmp_path, training__max_steps=1)) == 0
    else:
        with deaf(output) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert run_command(fake_config(model, tmp_path, training__max_steps=1)) == 0
    assert json.loads((tmp_path / "logs" / "trainer_state.json").read_text())["status"] == "finished"


def deaf(output: str) -> Any:
    if output == "full device":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        return open("/dev/full", "w")
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.filterwarnings("ignore:::wandb")
def test_a_tracker_that_rejects_leaves_nothing_that_looks_like_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match="wandb login"):
        train_quietly(fake_config(model, tmp_path, logging__wandb_project="tests"))
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=1))
    assert "held an earlier run" not in printed


class Dashboard:
    def __init__(self) -> None:
        self.logged: list[tuple[int, StepMetrics]] = []

    def start(self, config: object) -> None:
        pass

    def log(self, step: int, metrics: StepMetrics, groups: object) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.logged.append((-1, {}))


@pytest.mark.parametrize("every", [1, 3])
def test_dashboards_get_the_evaluation_after_the_last_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    dashboard = Dashboard()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("retrain.assemble.BackgroundTracker", lambda *given: dashboard)
    held_out = {"eval__every": 4, "eval__source": "jsonl", "eval__path": str(write_held_out(tmp_path))}
    result, _ = train_quietly(
        fake_config(model, tmp_path, logging__wandb_project="tests", logging__every=every, **held_out)
    )
    assert [step for step, _ in dashboard.logged] == ([0, 1, 2, 3, 4, -1] if every == 1 else [0, 2, 4, -1])
    _, row = dashboard.logged[-2]
    assert result.last_evaluation is not None
    assert row.items() >= (result.last_evaluation.metrics() | {"step": 4}).items()


def test_a_signal_while_training_lets_the_step_finish(
    model: Path, uncut: Rows, tmp_path: Path, play: type[Play]
) -> None:
    play.before_train = staticmethod(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(fake_config(model, tmp_path))
    assert [row["step"] for row in rows(tmp_path / "logs")] == [0, 1, 2]
    assert (tmp_path / "logs" / "checkpoints" / "step_000003").exists()
    play.before_train = staticmethod(lambda step: None)
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


def test_a_signal_between_sampling_and_training_gives_the_problems_back(
    model: Path, uncut: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, calls = Interrupts.hold, []

    def strike(self: Interrupts) -> None:
        calls.append(1)
        if len(calls) == 3 and not self.holding:
            os.kill(os.getpid(), signal.SIGINT)
        hold(self)

    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "hold", strike)
        with pytest.raises(KeyboardInterrupt):
            train_quietly(fake_config(model, tmp_path))
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


def test_an_error_in_the_middle_of_a_step_saves_nothing_half_done(
    model: Path, uncut: Rows, tmp_path: Path, play: type[Play]
) -> None:

    def fail(step: int) -> None:
        if step == 3:
            raise RolloutError("the training side broke")

    play.before_train = staticmethod(fail)
    with pytest.raises(RolloutError):
        train_quietly(fake_config(model, tmp_path))
    assert sorted(p.name for p in (tmp_path / "logs" / "checkpoints").iterdir()) == ["step_000002"]
    play.before_train = staticmethod(lambda step: None)
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


def test_the_same_seed_gives_the_same_run_and_another_seed_another(model: Path, tmp_path: Path) -> None:
    runs = []
    for at, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(at)
        folder.mkdir()
        train_quietly(fake_config(model, folder, training__seed=seed))
        runs.append((rows_without_times(folder / "logs"), rows(folder / "logs", "emergence/generations.jsonl")))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_checkpoint_that_is_deleted_while_the_model_loads_is_said_to_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_quietly(fake_config(model, tmp_path, training__max_steps=1))

    def load(self: object, path: Path) -> None:
        shutil.rmtree(path)  # as its run, still in progress, deletes older ones
        raise FileNotFoundError(path / "learner.safetensors")

    monkeypatch.setattr(FakeBackend, "load", load)
    resumed = {"resume__from": str(tmp_path / "logs"), "logging__log_dir": str(tmp_path / "other")}
    with pytest.raises(CheckpointError, match=r"step_000001 was deleted meanwhile.  Try: resume again"):
        train_quietly(fake_config(model, tmp_path, training__max_steps=2, **resumed))


def test_a_fresh_seed_is_written_down_and_taken_up_by_a_resume(model: Path, tmp_path: Path) -> None:
    from retrain.config import load_config

    train_quietly(fake_config(model, tmp_path, training__seed=-1, training__max_steps=2))
    seed = load_config(tmp_path / "logs" / "config.toml").training.seed
    assert seed >= 0
    train_quietly(fake_config(model, tmp_path, training__seed=-1, resume__from=str(tmp_path / "logs")))
    assert load_config(tmp_path / "logs" / "config.toml").training.seed == seed


def test_more_steps_can_be_asked_for_after_the_end(model: Path, uncut: Rows, tmp_path: Path) -> None:
    train_quietly(fake_config(model, tmp_path, training__max_steps=3))
    train_quietly(fake_config(model, tmp_path, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == uncut


@pytest.mark.parametrize(
    "examples",
    [
        {},
        {"data__source": "arithmetic", "data__path": ""},
        {"environment__provider": "builtin", "environment__id": "arithmetic"},
    ],
    ids=["rows", "an endless source", "an environment"],
)
def test_epochs_count_passes_over_max_examples(model: Path, tmp_path: Path, examples: dict[str, Any]) -> None:
    # Two passes over 4 examples, 2 of them in a step.
    config = fake_config(model, tmp_path, training__epochs=2.0, training__max_examples=4, **examples)
    with assemble(config, console=Console(StringIO())) as parts:
        assert parts.config.training.max_steps == 4
    if examples:
        endless = fake_config(model, tmp_path, training__epochs=2.0, **examples)
        with (
            pytest.raises(ConfigError, match=r"have no end\.  Try: max_examples"),
            assemble(endless, console=Console(StringIO())),
        ):
            pass


@pytest.mark.parametrize(
    ("batch_size", "schedule", "end"),
    [(2, "constant", "their end in"), (64, "cosine", "their end, a learning rate of 0,")],
)
def test_epochs_are_passes_whatever_batch_sizes_back_pressure_chooses(
    model: Path, tmp_path: Path, batch_size: int, schedule: str, end: str
) -> None:
    sizes = {"backpressure__enabled": True, "backpressure__max_batch_size": 16, "training__batch_size": batch_size}
    sizes |= {"optimizer__schedule": schedule}
    config = fake_config(model, tmp_path, training__epochs=4.0, **sizes)
    result, printed = train_quietly(config)
    # Four passes over 7 examples.
    assert sum(row["batch_size"] for row in rows(result.log_dir)) == 28
    assert sum(row["groups_sampled"] for row in rows(result.log_dir)) == 28
    assert "epochs = 4 ends the run after 28 examples, since [backpressure] changes the batch size" in printed
    assert f"and stay at {end}" in printed
    assert "by measured speed, so this run does not repeat bit for bit" in printed
    state = json.loads((Path(result.log_dir) / "trainer_state.json").read_text())
    assert state["step"] == state["max_steps"] == len(rows(result.log_dir))
    resumed = {"resume__from": result.log_dir, "training__epochs": 6.0}
    train_quietly(fake_config(model, tmp_path, **sizes | resumed))
    assert sum(row["batch_size"] for row in rows(result.log_dir)) == 42


@pytest.mark.parametrize(("wanted", "used"), [(-1.0, 0.7), (0.0, 0.0), (0.2, 0.2)])
def test_the_temperature_of_an_evaluation_is_its_own_or_that_of_training(
    model: Path, tmp_path: Path, wanted: float, used: float
) -> None:
    held_out = {"eval__every": 2, "eval__source": "jsonl", "eval__path": str(write_held_out(tmp_path))}
    with assemble(fake_config(model, tmp_path, eval__temperature=wanted, **held_out)) as parts:
        assert parts.evaluator.sampling.temperature == used


@pytest.mark.parametrize("save_every", [1, 2, 3, 5])
def test_a_row_has_the_numbers_of_its_own_step_although_the_backend_reports_late(
    model: Path, tmp_path: Path, save_every: int
) -> None:
    config = fake_config(
        model,
        tmp_path,
        backend__backend="e2e.fakes.build_settling",
        training__max_steps=5,
        training__save_every=save_every,
    )
    _, printed = train_quietly(config)
    metrics = rows(tmp_path / "logs")
    assert [(row["step"], row["loss"], row["lr"]) for row in metrics] == [(n, float(n), float(n)) for n in range(5)]
    assert [row["loss_is_placeholder"] for row in metrics] == [False] * 5
    assert [row["staleness"] for row in metrics] == [0, 1, 1, 1, 1]
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1, 2, 2]
    # The screen does not wait: it shows the step before's, and says so.
    assert [f"loss={max(0, n - 1):.4f} (placeholder)" in line for n, line in enumerate(step_lines(printed))] == [
        True
    ] * 5


@pytest.mark.parametrize("save_every", [1, 5])
def test_a_late_row_has_no_number_of_the_step_before_that_its_own_lacks(
    model: Path, tmp_path: Path, play: type[Play], save_every: int
) -> None:
    def report(step: int) -> None:
        # As of a step without data, in which no row is checked.
        play.outcome = {} if step == 2 else {"rows_checked": 10 + step}

    play.before_train = staticmethod(report)
    late = {"backend__backend": "e2e.fakes.build_settling", "training__save_every": save_every}
    train_quietly(fake_config(model, tmp_path, **late, training__max_steps=4))
    assert [row.get("rows_checked") for row in rows(tmp_path / "logs")] == [10, 11, None, 13]


def step_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("Step ")]


def test_a_late_backend_that_cannot_be_waited_for_says_which_numbers_are_not_the_steps_own(
    model: Path, tmp_path: Path
) -> None:
    config = {"backend__backend": "e2e.fakes.build_late", "training__max_steps": 5}
    train_quietly(fake_config(model, tmp_path, **config))
    metrics = rows(tmp_path / "logs")
    # Rows 1, 3 and 4 stand before a checkpoint.
    assert [row["loss_is_placeholder"] for row in metrics] == [False, True, False, True, True]
    assert [row["loss"] for row in metrics] == [0.0, 0.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize("call", [3, *slow(2, 4)])
def test_a_run_that_reports_late_and_is_cut_has_the_rows_of_the_one_that_was_not(
    model: Path, tmp_path: Path, play: type[Play], call: int
) -> None:
    late = {"backend__backend": "e2e.fakes.build_settling"}
    train_quietly(fake_config(model, tmp_path, **late, logging__log_dir=str(tmp_path / "whole")))
    play.calls = 0

    def interrupt(now: int) -> None:
        if now == call:
            os.kill(os.getpid(), signal.SIGINT)

    play.before_generate = staticmethod(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(fake_config(model, tmp_path, **late))
    assert [row["loss"] for row in rows(tmp_path / "logs")] == [float(n) for n in range(call - 1)]
    play.before_generate = staticmethod(lambda now: None)
    train_quietly(fake_config(model, tmp_path, **late, resume__from=str(tmp_path / "logs")))
    assert rows_without_times(tmp_path / "logs") == rows_without_times(tmp_path / "whole")


def test_a_resume_that_stretches_the_schedule_says_how_the_learning_rate_jumps(model: Path, tmp_path: Path) -> None:
    linear = {"optimizer__schedule": "linear", "training__lr": 1e-3, "resume__from": str(tmp_path / "logs")}
    train_quietly(fake_config(model, tmp_path, **linear | {"resume__from": ""}))
    _, printed = train_quietly(fake_config(model, tmp_path, **linear, training__max_steps=8))
    # Half of the new way is left where all of the old one was gone.
    assert (
        "Note: [training] max_steps changed from 4 to 8, and with it [optimizer] schedule = 'linear': "
        "the learning rate of step 4 is 0.0005 instead of 0."
    ) in printed
    _, printed = train_quietly(fake_config(model, tmp_path, **linear, training__max_steps=8))
    assert "Note: [training]" not in printed, "the same length"
    share = {"optimizer__warmup_steps": 0.9, "training__lr": 1e-3}
    train_quietly(fake_config(model, tmp_path, **share))
    share["resume__from"] = str(tmp_path / "logs")
    _, printed = train_quietly(fake_config(model, tmp_path, **share, training__max_steps=12))
    assert "and with it [optimizer] warmup_steps = 0.9: the learning rate of step 4 is " in printed
    train_quietly(fake_config(model, tmp_path))
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=6, resume__from=str(tmp_path / "logs")))
    assert "Note: [training]" not in printed, "a constant rate does not jump"
    _, printed = train_quietly(fake_config(model, tmp_path, training__max_steps=3, resume__from=str(tmp_path / "logs")))
    assert "Note: the run has completed 6 steps, more than max_steps = 3." in printed


def test_evaluations_are_not_written_twice_by_a_resume(model: Path, tmp_path: Path) -> None:
    held_out = {"eval__every": 2, "eval__source": "jsonl", "eval__path": str(write_held_out(tmp_path))}
    for steps in (2, 4, 4):
        resume = {"resume__from": str(tmp_path / "logs")} if (tmp_path / "logs").exists() else {}
        train_quietly(fake_config(model, tmp_path, training__max_steps=steps, **held_out, **resume))
    assert [row["step"] for row in rows(tmp_path / "logs", "eval.jsonl")] == [0, 2, 4]


def test_an_adapter_path_that_holds_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "thesis.tex").write_text("irreplaceable")
    _, printed = train_quietly(fake_config(model, tmp_path))
    assert (tmp_path / "adapter" / "thesis.tex").read_text() == "irreplaceable"
    (last,) = (line for line in printed.splitlines() if "so it is left alone" in line and "step_000004" in line)
    assert last.startswith(f"Warning: {tmp_path / 'adapter'} holds files that retrain did not write")


@dataclass
class NewerState(trainer.RunState):
    from_the_future: int = 0


def test_a_checkpoint_of_a_newer_version_is_rejected_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(trainer, "RunState", NewerState)
        train_quietly(fake_config(model, tmp_path))
    with pytest.raises(
        CheckpointError, match=r"contains from_the_future, which this version of retrain does not support"
    ):
        train_quietly(fake_config(model, tmp_path, training__max_steps=6, resume__from=str(tmp_path / "logs")))


def test_held_out_problems_that_are_trained_on_are_counted(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(6)]
    for name, some in (("train", rows[:4]), ("eval", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    paths = {"data__path": str(tmp_path / "train.jsonl"), "eval__path": str(tmp_path / "eval.jsonl")}
    config = fake_config(model, tmp_path, data__source="jsonl", eval__every=2, training__max_steps=1, **paths)
    _, printed = train_quietly(config)
    assert "Warning: 1 of 3 held-out problems are also in the training data" in printed
