"""The live line of a run on a terminal."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest

from retrain.config import load_config
from retrain.evaluate import Evaluation
from retrain.tracking.console import ERASE, Console
from retrain.tracking.live import LiveLine

METRICS: dict[str, Any] = {
    "condition": "grpo",
    "loss": 0.1,
    "loss_is_placeholder": False,
    "mean_reward": 0.8,
    "correct_rate": 0.82,
    "num_datums": 16,
    "batch_size": 4,
    "group_size": 4,
    "sepa_lambda": 0.0,
    "max_token_hit_rate": 0.01,
    "completion_tokens_mean": 41.2,
    "step_time_s": 3.1,
}


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def line_after(steps: int, unicode: bool = True, **metrics: Any) -> LiveLine:
    line = LiveLine(colored=False, unicode=unicode)
    line.total = 40
    for step in range(steps):
        line.update(step, METRICS | {"correct_rate": 0.82 * (step + 1) / steps} | metrics)
    return line


def test_the_line_has_everything_in_80_columns() -> None:
    text = line_after(12, eval_pass_at_1=0.85).text(79)
    assert text == "12/40 ▃▄▄▅▅▆▇▇ correct 82% held-out 85% len 41 cut 1% 3.1s/step ETA 1:27"
    assert len(text) < 80


def test_a_phase_has_a_bar() -> None:
    assert line_after(12).text(79, "sampling", 64, 128).endswith("correct 82% sampling ━━━━━━━━╌╌╌╌╌╌╌╌ 64/128")
    assert line_after(0).text(79, "scoring", 3, 0) == "0/40 scoring 3/0"
    plain = line_after(2, unicode=False).text(79, "training", 1, 4)
    assert plain == "2/40 correct 82% training ####------------ 1/4"


@pytest.mark.parametrize("width", [1, 5, 20, 40, 79])
def test_what_does_not_fit_is_left_out(width: int) -> None:
    assert len(line_after(12, eval_pass_at_1=0.85).text(width)) <= width


def test_steps_replace_each_other_and_evaluations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = Console(stream)
    console.start(load_config(None, {"training.max_steps": 3}))
    evaluated = {"eval_pass_at_1": 0.5, "eval_ci_low": 0.4, "eval_ci_high": 0.6}
    console.log(0, METRICS | evaluated, [])
    for step in (1, 2):
        console.log(step, METRICS, [])
    console.finish()
    seen = [line.split(ERASE)[-1] for line in stream.getvalue().split("\n")]
    assert seen == [
        "Step 0: held-out 50.0% (95% interval 40.0 to 60.0)",
        "3/3 ▇▇▇ correct 82% held-out 50% len 41 cut 1% 3.1s/step",
        "",
    ]


def test_the_line_that_stays_has_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = Console(stream)
    console.log(0, METRICS | {"eval_pass_at_1": 0.5}, [])
    console.log_evaluation(Evaluation(correct=(3, 4), counted=(4, 4), k=1))
    console.finish()
    assert "held-out 88%" in stream.getvalue().split("\n")[-2].split(ERASE)[-1]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_and_redrawing_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored, plain = Terminal(), Terminal()
    Console(colored).log(0, METRICS, [])
    assert "\x1b[32m" in colored.getvalue()
    monkeypatch.setenv(variable, value)
    Console(plain).log(0, METRICS, [])
    assert "\x1b[32m" not in plain.getvalue()
    assert ("Step 0 [grpo] |" in plain.getvalue()) == (value == "dumb")
