"""Checks of a run's health, on rows made by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from retrain.analysis.health import METRIC_KEYS, Check, check_health, help_line, overall, strip, worst
from tests.cases import slow

HEALTHY: dict[str, Any] = {
    "mean_reward": 0.2,
    "exec_entropy_mean": 1.0,
    "uncertainty_kind": "surprisal",
    "completion_tokens_mean": 40.0,
    "completion_tokens_p95": 60.0,
    "max_token_hit_rate": 0.01,
    "batch_size": 8,
    "group_size": 4,
    "groups_all_right": 1,
    "groups_all_wrong": 1,
    "ratio_mean": 1.0,
    "rows_excluded": 0,
    "reward_errors": 0,
}


def steps(count: int = 40, late: int = 20, **changes: Any) -> list[dict[str, Any]]:
    """Rows of a healthy run whose reward rises, with changes from step `late` on."""
    rows = [HEALTHY | {"step": step, "mean_reward": 0.2 + 0.01 * step + 0.001 * (step % 3)} for step in range(count)]
    return [row | changes if row["step"] >= late else row for row in rows]


def evaluation(step: int, one: float, many: float) -> dict[str, Any]:
    return {
        "step": step,
        "eval_pass_at_1": one,
        "eval_pass_at_k": many,
        "eval_ci_low": one - 0.05,
        "eval_ci_high": one + 0.05,
    }


def find(name: str, checks: list[Check]) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def test_a_healthy_run_has_nothing_to_report() -> None:
    checks = check_health(steps(), [evaluation(0, 0.2, 0.5), evaluation(40, 0.6, 0.8)], max_tokens=128)
    assert [check.level for check in checks] == ["ok"] * 8
    assert worst(checks) is None and {level for _, level in strip(checks)} == {"ok"}
    assert find("learning", checks).value == "held-out 20% → 60%"


@pytest.mark.parametrize(
    ("name", "changes", "level", "step"),
    [
        # A mean over ten steps: 0.01 before, so it reaches 0.1 after one step of 1.0.
        ("truncation", {"max_token_hit_rate": 1.0}, "problem", 20),
        ("truncation", {"max_token_hit_rate": 0.2}, "warning", 24),
        ("dead groups", {"groups_all_wrong": 7}, "problem", 23),
        ("dead groups", {"groups_all_wrong": 4}, "warning", 26),
        ("reward errors", {"reward_errors": 1}, "warning", 20),
        ("reward errors", {"reward_errors": 32}, "problem", 20),
        ("entropy", {"exec_entropy_mean": 0.1}, "warning", 28),
        ("entropy", {"exec_entropy_mean": 0.0}, "problem", 27),
        ("length", {"completion_tokens_mean": 200.0}, "warning", 25),
        ("length", {"completion_tokens_p95": 120.0}, "warning", 29),
        ("length", {"completion_tokens_mean": 4.0}, "warning", 27),
        ("sampler–trainer mismatch", {"ratio_mean": 1.05}, "warning", 23),
        ("sampler–trainer mismatch", {"ratio_mean": 0.5}, "problem", 20),
        ("sampler–trainer mismatch", {"rows_excluded": 2}, "warning", 20),
        ("learning", {"mean_reward": 0.245}, "warning", None),
        ("learning", {"mean_reward": 0.0}, "problem", None),
    ],
)
def test_a_check_knows_its_level_and_the_first_step(
    name: str, changes: dict[str, Any], level: str, step: int | None
) -> None:
    checks = check_health(steps(**changes), max_tokens=128)
    found = find(name, checks)
    assert (found.level, found.step) == (level, step)
    bad = worst(checks)
    shown = [text for text, level in strip(checks) if level != "ok"]
    assert bad is not None and any(text.startswith(f"{name} {found.value}") for text in shown)


def test_lengths_of_several_turns_are_not_compared_with_the_limit_of_one() -> None:
    full = check_health(steps(turns=1.0, completion_tokens_p95=120.0), max_tokens=128)
    assert (find("length", full).level, find("length", full).value) == ("warning", "40 → 40 tokens, p95 120 of 128")
    assert find("length", check_health(steps(turns=2.5, completion_tokens_p95=300.0), max_tokens=128)).level == "ok"


def test_shares_are_of_the_groups_sampled() -> None:
    # Two rounds more: of 24 groups of 4, 16 were dead and 12 of 96 completions were not scored.
    resampled = {"groups_sampled": 24, "groups_all_right": 0, "groups_all_wrong": 16, "reward_errors": 12}
    checks = check_health(steps(late=0, **resampled))
    assert find("dead groups", checks).value == "66.7% of groups gave no signal"
    assert find("reward errors", checks).value == "12.5% of scores failed"
    older = check_health(steps(late=0, groups_all_right=0, groups_all_wrong=4))
    assert find("dead groups", older).value == "50% of groups gave no signal"


@pytest.mark.parametrize(
    ("failed", "level", "step", "value"),
    [
        ([0, 40], "problem", 20, "0% of scores failed, 31.2% in the newest evaluation"),
        ([1, 1], "warning", 0, "0% of scores failed, 0.781% in the newest evaluation"),
        ([40, 0], "ok", None, "0% of scores failed"),
        ([None, None], "ok", None, "0% of scores failed"),
    ],
)
def test_failed_scores_of_the_newest_evaluation_count(
    failed: list[int | None], level: str, step: int | None, value: str
) -> None:
    # 64 problems with 2 completions each.
    setup = {"sampling": {"n": 2}, "correct": [1] * 64, "counted": [2] * 64}
    rows = [
        evaluation(at, 0.5, 0.5) | setup | ({} if count is None else {"eval_reward_errors": count})
        for at, count in zip((0, 20), failed, strict=True)
    ]
    found = find("reward errors", check_health(steps(), rows))
    assert (found.level, found.step, found.value) == (level, step, value)
    if level == "problem":
        unlogged = find("reward errors", check_health([{"step": 0}], rows))
        assert (unlogged.level, unlogged.value) == (level, "31.2% in the newest evaluation: scores failed")


@pytest.mark.parametrize(
    ("none", "scored", "level", "value"),
    [
        (26, 0.05, "problem", "0% of scores failed, 81.2% of rewards are None, 95% of rewards are None in the newest"),
        (4, 1.0, "warning", "0% of scores failed, 12.5% of rewards are None"),
        (0, 0.5, "problem", "0% of scores failed, 50% of rewards are None in the newest evaluation"),
        (3, 1.0, "ok", "0% of scores failed"),
    ],
)
def test_rewards_of_none_are_pointed_out(none: int, scored: float, level: str, value: str) -> None:
    setup = {"sampling": {"n": 1}, "correct": [0] * 40, "counted": [int(at < 40 * scored) for at in range(40)]}
    rows = [evaluation(at, 0.5, 0.5) | setup | {"eval_reward_errors": 0} for at in (0, 20)]
    found = find("reward errors", check_health(steps(late=0, rewards_none=none), rows))
    assert found.level == level and found.value.startswith(value) and (found.step == 0) == found.is_bad
    if level == "problem":
        unlogged = find("reward errors", check_health([{"step": 0}], rows))
        assert unlogged.value == f"{1 - scored:.0%} of rewards are None in the newest evaluation"


def test_an_evaluation_in_which_nothing_was_scored_is_no_decline() -> None:
    empty = {"sampling": {"n": 1}, "correct": [0] * 40, "counted": [0] * 40, "eval_reward_errors": 0}
    rows = [evaluation(0, 0.5, 0.5), evaluation(20, 0.6, 0.6), evaluation(40, 0.0, 0.0) | empty]
    checks = check_health(steps(rewards_none=0), rows)
    assert find("learning", checks).value.startswith("held-out 50% → 60%")
    assert find("reward errors", checks).value.endswith("100% of rewards are None in the newest evaluation")


@pytest.mark.parametrize("count", [20, *slow(60)])
def test_a_reward_that_only_fluctuates_is_neither_learning_nor_a_problem(count: int) -> None:
    rng = np.random.default_rng(count)
    rewards = rng.binomial(128, 0.4, (2000, count)) / 128
    levels = [
        find("learning", check_health([{"step": step, "mean_reward": r} for step, r in enumerate(run)])).level
        for run in rewards.tolist()
    ]
    assert levels.count("ok") + levels.count("problem") <= 0.06 * len(levels)
    # Half as many right again.
    risen = [[*run[: count // 2], *(rng.binomial(128, 0.6, count // 2) / 128)] for run in rewards.tolist()]
    found = [check_health([{"step": step, "mean_reward": r} for step, r in enumerate(run)]) for run in risen]
    assert sum(find("learning", checks).level == "ok" for checks in found) >= 0.99 * len(found)


def test_a_constant_reward_has_no_noise() -> None:
    flat = [{"step": step, "mean_reward": 0.5} for step in range(20)]
    assert find("learning", check_health(flat)).level == "warning"
    risen = [row | {"mean_reward": 0.6} if row["step"] >= 10 else row for row in flat]
    assert find("learning", check_health(risen)).level == "ok"


def test_what_was_not_logged_or_is_too_early_is_unknown() -> None:
    assert {check.level for check in check_health([])} == {"unknown"}
    assert {check.level for check in check_health([{"step": 0}])} == {"unknown"}
    early = {check.name: check.level for check in check_health(steps(5))}
    assert early["learning"] == early["entropy"] == "unknown"


def test_a_run_shorter_than_the_window_is_no_alarm_unless_its_numbers_are_wrong() -> None:
    bad = {"max_token_hit_rate": 0.5, "groups_all_wrong": 7, "completion_tokens_p95": 128.0}
    for count, level in ((9, "unknown"), (10, "problem")):
        checks = check_health(steps(count, 0, **bad), max_tokens=128)
        assert find("truncation", checks).level == find("dead groups", checks).level == level
        assert find("length", checks).level == ("unknown" if level == "unknown" else "warning")
    early = find("truncation", check_health(steps(3, 0, **bad)))
    assert (early.value, early.step) == ("50% of completions, fewer than 10 steps", None)
    broken = check_health(steps(3, 0, reward_errors=8, ratio_mean=1.5))
    assert help_line(broken) == "Causes and fixes: retrain man --topic mismatch (also: reward-errors)"


def test_the_word_for_a_sound_run_says_how_many_checks_are_known() -> None:
    words = [overall(check_health(steps(count))) for count in (4, 12, 40)]
    assert words == ["ok (2 of 8)", "ok (5 of 8)", "ok (7 of 8)"]
    assert overall(check_health([])) == "too early" and overall([]) == "-"


def test_held_out_results_decide_about_learning() -> None:
    flat = [evaluation(0, 0.2, 0.5), evaluation(40, 0.22, 0.5)]
    noise = find("learning", check_health(steps(), flat))
    assert (noise.level, noise.value) == ("warning", "held-out 20% → 22%, within noise")
    worse = [evaluation(0, 0.2, 0.5), evaluation(20, 0.1, 0.5), evaluation(40, 0.0, 0.5)]
    assert find("learning", check_health(steps(), worse)).level == "problem"
    assert find("learning", check_health(steps(), worse)).step == 20


def test_narrowing_is_pass_at_1_up_while_pass_at_k_falls() -> None:
    rows = [evaluation(0, 0.2, 0.6), evaluation(20, 0.3, 0.55), evaluation(40, 0.4, 0.5)]
    found = find("diversity", check_health(steps(), rows))
    assert (found.level, found.step, found.value) == ("warning", 20, "pass@k 60% → 50%")
    assert find("diversity", check_health(steps(), [rows[0], evaluation(40, 0.1, 0.5)])).level == "ok"
    single = [evaluation(0, 0.1, 0.1), evaluation(40, 0.5, 0.5)]
    assert find("diversity", check_health(steps(), single)).level == "unknown", "one sample per problem shows nothing"


@pytest.mark.parametrize(
    ("lost", "won", "level", "value"),
    [(3, 1, "ok", "pass@k 80% → 76%, within noise"), (10, 0, "warning", "pass@k 80% → 60%")],
)
def test_narrowing_within_noise_raises_no_alarm(lost: int, won: int, level: str, value: str) -> None:
    """Fifty problems with two samples each; some of them are lost, others won, and the rest solved more reliably."""
    before = [1] * 40 + [0] * 10
    after = [0] * lost + [2] * (40 - lost) + [1] * won + [0] * (10 - won)
    rows = [
        evaluation(step, sum(right) / 100, sum(c > 0 for c in right) / 50)
        | {"k": 2, "correct": right, "counted": [2] * 50}
        for step, right in ((0, before), (20, after), (40, after))
    ]
    found = find("diversity", check_health(steps(), rows))
    assert (found.level, found.value, found.step) == (level, value, 20 if level == "warning" else None)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    checks = check_health(steps(ratio_mean=float("nan"), exec_entropy_mean=None))
    assert find("sampler–trainer mismatch", checks).level == "ok"


class Spy(dict[str, Any]):
    """A row that remembers what was read from it."""

    read: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_the_checks_read_the_listed_metrics() -> None:
    check_health([Spy(row) for row in steps()])
    assert Spy.read == {*METRIC_KEYS, "step", "uncertainty_kind"}


def test_the_help_names_the_topic_of_the_worst_check_first() -> None:
    checks = check_health(steps(late=0, max_token_hit_rate=0.2, groups_all_right=8))
    assert help_line(checks) == "Causes and fixes: retrain man --topic dead-groups (also: truncation)"
    assert help_line(check_health(steps())) == ""


def test_a_run_most_of_whose_updates_are_skipped_does_not_learn() -> None:
    short = [HEALTHY | {"step": step, "mean_reward": 0.5, "skipped_steps": step + 1} for step in range(3)]
    check = find("learning", check_health(short))
    assert (check.level, check.step) == ("problem", 0)
    assert check.value == "3 of the last 3 updates skipped, not finite"
    # Of those before an edit, only the total is known.
    edited = [HEALTHY | {"step": step, "skipped_steps": min(step + 1, 9)} for step in range(12)]
    value = find("learning", check_health(edited, edited_at=7)).value
    assert value.startswith("reward") or "fewer than" in value
    several = [row | {"skipped_steps": row["step"] + 1} for row in edited]
    assert "4 of the last 5 updates" in find("learning", check_health(several, edited_at=7)).value
    # Once, or long ago: the result counts.
    for skipped in ([0] * 39 + [1], [0] * 5 + [9] * 35):
        rows = [row | {"skipped_steps": count} for row, count in zip(steps(), skipped, strict=True)]
        assert find("learning", check_health(rows)).level == "ok"


def test_several_samples_without_a_right_answer_are_several_samples() -> None:
    none = [evaluation(step, 0.0, 0.0) | {"k": 2} for step in (0, 10)]
    assert find("diversity", check_health(steps(), none)).level == "ok"
    single = [evaluation(step, 0.5, 0.5) | {"k": 1} for step in (0, 10)]
    assert "several samples" in find("diversity", check_health(steps(), single)).value


def test_a_full_context_is_not_blamed_on_max_tokens() -> None:
    cut = find("truncation", check_health(steps(max_token_hit_rate=0.5, context_hit_rate=0.1)))
    assert cut.value.endswith("of completions")
    full = find("truncation", check_health(steps(max_token_hit_rate=0.5, context_hit_rate=0.5)))
    assert full.level == "problem" and full.value == "50% of completions (context full: 50%)"


def test_a_check_names_the_step_since_which_it_is_broken() -> None:
    dead = [step < 2 or step >= 50 for step in range(60)]
    rows = [HEALTHY | {"step": step, "max_token_hit_rate": float(is_dead)} for step, is_dead in enumerate(dead)]
    check = find("truncation", check_health(rows))
    assert (check.level, check.step) == ("problem", 50)
    assert find("truncation", check_health(rows[:40])).step is None


def test_skipped_updates_are_counted_since_they_are_many() -> None:
    skipped = [1 if step == 3 else 0 for step in range(52)] + [1] * 8
    totals = [sum(skipped[: step + 1]) for step in range(60)]
    check = find("learning", check_health([HEALTHY | {"step": s, "skipped_steps": n} for s, n in enumerate(totals)]))
    assert check.value.startswith("8 of the last 10 updates skipped") and check.step == 56
