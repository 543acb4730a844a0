"""Health of a run: the usual ways in which RL on language models goes wrong, each with its threshold.

Every check looks at a mean over the last steps, so one bad batch raises no alarm, and knows since which step its
threshold is crossed. The report, `retrain status`, `retrain top` and the end of a run show the same checks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from retrain.analysis.change import Row, comparable, noise_between, paired_change
from retrain.storage.logs import groups_sampled

Level = Literal["ok", "warning", "problem", "unknown"]

WINDOW = 10
"""Steps that a value is averaged over; in a shorter run, length, truncation and dead groups are unknown."""
SHORTEST = 20
"""Steps before the beginning and the end of a run are compared."""
SEVERITY: dict[Level, int] = {"unknown": 0, "ok": 1, "warning": 2, "problem": 3}
BAD: tuple[Level, ...] = ("warning", "problem")
METRIC_KEYS = (
    "mean_reward", "exec_entropy_mean", "completion_tokens_mean", "completion_tokens_p95", "max_token_hit_rate",
    "batch_size", "group_size", "groups_all_right", "groups_all_wrong", "ratio_mean", "rows_excluded", "reward_errors",
    "rewards_none", "turns", "groups_sampled", "skipped_steps", "context_hit_rate",
)  # fmt: skip
"""The numbers of metrics.jsonl that the checks read."""
NONE_LIMITS = (0.1, 0.5)
"""Shares of rewards of None that are a warning and a problem: the reward may forget to return 0.0."""
TOPICS = {
    "learning": "no-learning", "entropy": "entropy-collapse", "sampler–trainer mismatch": "mismatch",
}  # fmt: skip
"""Sections of the manual and of docs/troubleshooting.md that are not named after their check."""


@dataclass(frozen=True)
class Check:
    """One check: its level, the value found, the rule, and since which step it is so."""

    name: str
    level: Level
    value: str
    rule: str
    step: int | None = None
    """The step since which it is beyond the threshold; None if it is not."""
    filter: str = ""
    """Which completions show it: truncated, errors, wrong, longest; empty for all."""

    @property
    def is_bad(self) -> bool:
        """Whether it is a warning or a problem."""
        return self.level in BAD

    @property
    def topic(self) -> str:
        """The topic of the manual that explains it."""
        return TOPICS.get(self.name, self.name.replace(" ", "-"))


def check_health(
    metrics: Sequence[Row], evaluations: Sequence[Row] = (), max_tokens: int | None = None, edited_at: int = 0
) -> list[Check]:
    """All checks of a run, from its rows of metrics.jsonl and eval.jsonl in order of steps.

    Rewards before `edited_at`, when data, code or options were changed, do not compare with later ones.
    """
    evaluations = comparable(evaluations)
    scored = [row for row in evaluations if any(row.get("counted", (1,)))]
    return [
        _check_learning([row for row in metrics if row["step"] >= edited_at], scored),
        _check_entropy(metrics),
        _wait(_check_length(metrics, max_tokens), len(metrics)),
        _wait(_check_truncation(metrics), len(metrics)),
        _wait(_limit("dead groups", metrics, dead_share, (0.5, 0.9), "of groups gave no signal", ""), len(metrics)),
        _check_mismatch(metrics),
        _check_rewards(metrics, evaluations),
        _check_diversity(scored),
    ]


def worst(checks: Sequence[Check]) -> Check | None:
    """The most severe check; None if nothing is wrong."""
    bad = [check for check in checks if check.is_bad]
    return max(bad, key=lambda check: SEVERITY[check.level]) if bad else None


def overall(checks: Sequence[Check]) -> str:
    """A word for checks of which none is bad, and how many of them are known."""
    known = sum(check.level != "unknown" for check in checks)
    if not known:
        return "too early" if checks else "-"
    return "ok" if known == len(checks) else f"ok ({known} of {len(checks)})"


def strip(checks: Sequence[Check]) -> list[tuple[str, Level]]:
    """Every check that is known, worst first, each with the level that colours it; the values of the bad ones."""
    known = sorted((check for check in checks if check.level != "unknown"), key=lambda check: -SEVERITY[check.level])
    return [
        (f"{check.name} {check.value}{_since(check)}" if check.is_bad else check.name, check.level) for check in known
    ]


def _since(check: Check) -> str:
    return "" if check.step is None else f" (since step {check.step})"


def help_line(checks: Sequence[Check]) -> str:
    """The command that explains the checks that are not ok, most severe first; empty if there are none."""
    bad = sorted((check for check in checks if check.is_bad), key=lambda check: -SEVERITY[check.level])
    first, *rest = dict.fromkeys(check.topic for check in bad) or [""]
    more = f" (also: {', '.join(rest)})" if rest else ""
    return f"Causes and fixes: retrain man --topic {first}{more}" if first else ""


def hit_rate(row: Row) -> float | None:
    """The share of completions that a token limit cut off, or of conversations that it ended."""
    return row.get("max_token_hit_rate")


def dead_share(row: Row) -> float | None:
    """The share of groups whose rewards were all equal."""
    groups = groups_sampled(row)
    if not groups or row.get("groups_all_right") is None:
        return None
    return (float(row["groups_all_right"]) + float(row.get("groups_all_wrong") or 0)) / groups


def error_share(row: Row) -> float | None:
    """The share of completions whose scoring failed."""
    count = groups_sampled(row) * float(row.get("group_size") or 0)
    return float(row["reward_errors"]) / count if count and row.get("reward_errors") is not None else None


def none_share(row: Row) -> float | None:
    """The share of completions for which the reward returned None."""
    count = groups_sampled(row) * float(row.get("group_size") or 0)
    return float(row["rewards_none"]) / count if count and row.get("rewards_none") is not None else None


def eval_error_share(row: Row) -> float | None:
    """The share of an evaluation's completions whose scoring failed; older rows do not have it."""
    failed, count = _number(row.get("eval_reward_errors")), _count_evaluated(row)
    return failed / count if failed is not None and count else None


def eval_none_share(row: Row) -> float | None:
    """The share of an evaluation's completions for which the reward returned None."""
    failed, count = eval_error_share(row), _count_evaluated(row)
    return None if failed is None or not count else max(0.0, 1 - sum(row["counted"]) / count - failed)


def _count_evaluated(row: Row) -> float | None:
    """The completions of an evaluation."""
    problems, sampling = row.get("counted"), row.get("sampling")
    samples = _number(sampling.get("n")) if isinstance(sampling, Mapping) else None
    return len(problems) * samples if problems and samples else None


def _wait(check: Check, steps: int) -> Check:
    """The check, or "unknown" while there are fewer steps than it averages over."""
    if check.level == "unknown" or steps >= WINDOW:
        return check
    return replace(check, level="unknown", value=f"{check.value}, fewer than {WINDOW} steps", step=None)


def _limit(
    name: str,
    metrics: Sequence[Row],
    read: Callable[[Row], float | None],
    limits: tuple[float, float],
    what: str,
    shows: str,
) -> Check:
    """A share that should stay below two limits."""
    means = _means(metrics, read)
    rule = f"warning from {_percent(limits[0])}, problem from {_percent(limits[1])} over {WINDOW} steps"
    if not means:
        return Check(name, "unknown", "not logged", rule)
    last = means[-1][1]
    level: Level = "problem" if last >= limits[1] else "warning" if last >= limits[0] else "ok"
    return Check(
        name, level, f"{_percent(last)} {what}", rule, _since_step(means, lambda mean: mean >= limits[0]), shows
    )


def _check_truncation(metrics: Sequence[Row]) -> Check:
    check = _limit("truncation", metrics, hit_rate, (0.1, 0.3), "of completions", "truncated")
    # Only environments have it: other prompts are checked to fit with max_tokens.
    full = _means(metrics, lambda row: row.get("context_hit_rate"))
    # There, a higher max_tokens would not help.
    if check.is_bad and full and full[-1][1] >= _means(metrics, hit_rate)[-1][1] / 2:
        return replace(check, value=f"{check.value} (context full: {_percent(full[-1][1])})")
    return check


def _check_rewards(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Check:
    """Completions that rates miss, in training and in the newest evaluation: failed scores, and rewards of None."""
    check = _check_reward_errors(metrics, evaluations)
    low, high = NONE_LIMITS
    rule = f"{check.rule}; of None: warning from {_percent(low)}, problem from {_percent(high)}"
    level, since, values = check.level, [check.step], [check.value] if check.level != "unknown" else []
    evaluated = [(int(row["step"]), share) for row in evaluations if (share := eval_none_share(row)) is not None]
    for shares, where in ((_means(metrics, none_share), ""), (evaluated, " in the newest evaluation")):
        if shares and shares[-1][1] >= low:
            found: Level = "problem" if shares[-1][1] >= high else "warning"
            level = max(level, found, key=SEVERITY.__getitem__)
            values.append(f"{_percent(shares[-1][1])} of rewards are None{where}")
            since.append(_since_step(shares, lambda share: share >= low))
    return replace(
        check,
        level=level,
        value=", ".join(values) or check.value,
        rule=rule,
        step=min((step for step in since if step is not None), default=None),
        filter=check.filter if check.is_bad else "",
    )


def _check_reward_errors(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Check:
    limits = (0.001, 0.1)
    check = _limit("reward errors", metrics, error_share, limits, "of scores failed", "errors")
    check = replace(check, rule=f"{check.rule}, or in the newest evaluation")
    shares = [(int(row["step"]), share) for row in evaluations if (share := eval_error_share(row)) is not None]
    if not shares or not shares[-1][1]:
        return check
    last = shares[-1][1]
    level: Level = "problem" if last >= limits[1] else "warning" if last >= limits[0] else "ok"
    known = "" if check.level == "unknown" else f"{check.value}, "
    since = (check.step, _since_step(shares, lambda share: share >= limits[0]))
    return replace(
        check,
        level=max(check.level, level, key=SEVERITY.__getitem__),
        value=f"{known}{_percent(last)} in the newest evaluation" + ("" if known else ": scores failed"),
        step=min((step for step in since if step is not None), default=None),
    )


def _check_learning(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Check:
    rule = f"held-out pass@1 above the first by more than noise, else reward above that of the first {WINDOW} steps"
    skipped = _skipped_updates(metrics)
    since = _since_step(skipped, lambda share: share >= 0.5)
    if since is not None:
        window = min(WINDOW, len(metrics))
        value = f"{round(skipped[-1][1] * window)} of the last {window} updates skipped, not finite"
        return Check("learning", "problem", value, rule, since)
    rows = [row for row in evaluations if _number(row.get("eval_pass_at_1")) is not None]
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        direction, before, after = _change(first, last)
        value = f"held-out {_percent(before)} → {_percent(after)}"
        if direction < 0:
            worse = _since_step([(int(row["step"]), _change(first, row)[0]) for row in rows], lambda change: change < 0)
            return Check("learning", "problem", value, rule, worse, "wrong")
        level: Level = "ok" if direction > 0 else "warning"
        value += "" if level == "ok" else ", within noise"
        # An evaluation after a few steps cannot show much yet.
        if level == "warning" and int(last["step"]) - int(first["step"]) < SHORTEST:
            level = "unknown"
        return Check("learning", level, value, rule, None, "wrong")
    rewards = [reward for row in metrics if (reward := _number(row.get("mean_reward"))) is not None]
    if len(rewards) < SHORTEST:
        return Check("learning", "unknown", _too_few(metrics, "reward"), rule)
    start, end = rewards[:WINDOW], rewards[-WINDOW:]
    before, after = statistics.fmean(start), statistics.fmean(end)
    value = f"reward {before:.3g} → {after:.3g}"
    if abs(after - before) <= noise_between(start, end):
        return Check("learning", "warning", f"{value}, within noise", rule, None, "wrong")
    return Check("learning", "ok" if after > before else "problem", value, rule, None, "wrong")


def _skipped_updates(metrics: Sequence[Row]) -> list[tuple[int, float]]:
    """At every step, the share of the last updates that were skipped, since their gradient was not finite."""
    counts = [int(_number(row.get("skipped_steps")) or 0) for row in metrics]
    # The number grows over the whole run, of which these may be the last steps.
    before = counts[0] if metrics and metrics[0]["step"] > 0 else 0
    counts = [before] * WINDOW + counts
    return [
        (int(row["step"]), (counts[at + WINDOW] - counts[at]) / min(WINDOW, at + 1)) for at, row in enumerate(metrics)
    ]


def _change(first: Row, last: Row) -> tuple[int, float, float]:
    """1 or -1 if pass@1 has risen or fallen by more than noise, else 0; and pass@1 before and after."""
    change = paired_change(first, last)
    if change is not None:
        direction = 0 if change.is_noise else 1 if change.difference > 0 else -1
        return direction, change.before, change.after
    # Without the results of each problem: beyond the interval of the first evaluation.
    before, after = float(first["eval_pass_at_1"]), float(last["eval_pass_at_1"])
    low, high = (_number(first.get(key, before)) for key in ("eval_ci_low", "eval_ci_high"))
    assert low is not None and high is not None
    return 1 if after > high else -1 if after < low else 0, before, after


def _check_entropy(metrics: Sequence[Row]) -> Check:
    rule = f"warning below 1/4 of the first {WINDOW} steps, problem below 1/20"
    means = _means(metrics, lambda row: row.get("exec_entropy_mean"))
    kind = str(metrics[-1].get("uncertainty_kind") or "entropy") if metrics else "entropy"
    if len(means) < SHORTEST:
        return Check("entropy", "unknown", _too_few(metrics, "value") if means else "not logged", rule)
    start, last = means[WINDOW - 1][1], means[-1][1]
    if start <= 0:
        return Check("entropy", "unknown", f"{kind} {last:.3g}", rule)
    level: Level = "problem" if last < start / 20 else "warning" if last < start / 4 else "ok"
    first = _since_step(means[WINDOW:], lambda mean: mean < start / 4)
    return Check("entropy", level, f"{kind} {start:.3g} → {last:.3g}", rule, first)


def _too_few(metrics: Sequence[Row], what: str) -> str:
    """That there are too few steps, or, in a longer run, too few that have it."""
    return f"fewer than {SHORTEST} steps" + (f" with a {what}" if len(metrics) >= SHORTEST else "")


def _check_length(metrics: Sequence[Row], max_tokens: int | None) -> Check:
    limit = "for single-turn runs, p95 at 90% of max_tokens"
    rule = f"warning if at least 3x or at most 1/3 of the first {WINDOW} steps, or, {limit}"
    means = _means(metrics, lambda row: row.get("completion_tokens_mean"))
    if not means:
        return Check("length", "unknown", "not logged", rule)
    start, last = means[min(WINDOW, len(means)) - 1][1], means[-1][1]
    value = f"{last:.0f} tokens" if len(means) < SHORTEST else f"{start:.0f} → {last:.0f} tokens"
    is_far = len(means) >= SHORTEST and start > 0 and not start / 3 <= last <= 3 * start
    tails = _means(metrics, lambda row: row.get("completion_tokens_p95"))
    # The lengths are of whole conversations, and max_tokens limits a turn.
    is_one_turn = all((_number(row.get("turns")) or 1.0) <= 1.0 for row in metrics)
    is_full = is_one_turn and max_tokens is not None and bool(tails) and tails[-1][1] >= 0.9 * max_tokens
    value += f", p95 {tails[-1][1]:.0f} of {max_tokens}" if is_full else ""
    far = _since_step(means[WINDOW:], lambda mean: not start / 3 <= mean <= 3 * start) if is_far else None
    full = _since_step(tails, lambda mean: mean >= 0.9 * (max_tokens or 0)) if is_full else None
    first = min((step for step in (far, full) if step is not None), default=None)
    return Check("length", "warning" if is_far or is_full else "ok", value, rule, first, "longest")


def _check_mismatch(metrics: Sequence[Row]) -> Check:
    rule = "warning if rows were excluded or the mean ratio differs from 1 by 2%, problem from 10%"
    means = _means(metrics, lambda row: row.get("ratio_mean"))
    excluded = sum(int(row.get("rows_excluded") or 0) for row in metrics)
    if not means and not excluded:
        return Check("sampler–trainer mismatch", "unknown", "not logged", rule)
    gap = abs(means[-1][1] - 1) if means else 0.0
    level: Level = "problem" if gap >= 0.1 else "warning" if gap >= 0.02 or excluded else "ok"
    far = [int(row["step"]) for row in metrics if row.get("rows_excluded")][:1]
    far += [step for step in [_since_step(means, lambda mean: abs(mean - 1) >= 0.02)] if step is not None]
    value = f"mean ratio {means[-1][1]:.3f}" if means else ""
    value += f"{', ' if value else ''}{excluded} rows excluded" if excluded else ""
    return Check("sampler–trainer mismatch", level, value, rule, min(far, default=None))


def _check_diversity(evaluations: Sequence[Row]) -> Check:
    rule = "warning if held-out pass@1 rises while pass@k falls by 2 points and more than noise"
    keys = ("eval_pass_at_1", "eval_pass_at_k")
    rows = [row for row in evaluations if all(_number(row.get(key)) is not None for key in keys)]
    if len(rows) < 2:
        return Check("diversity", "unknown", "needs two evaluations with pass@k", rule)
    (one, many), (one_now, many_now) = (
        (float(row["eval_pass_at_1"]), float(row["eval_pass_at_k"])) for row in (rows[0], rows[-1])
    )
    # Rows of earlier versions lack `k`.
    if all(row["k"] == 1 if "k" in row else row["eval_pass_at_1"] == row["eval_pass_at_k"] for row in rows):
        return Check("diversity", "unknown", "needs several samples per problem: [eval] samples", rule)
    value = f"pass@k {_percent(many)} → {_percent(many_now)}"
    if one_now <= one or many_now >= many - 0.02:
        return Check("diversity", "ok", value, rule, None, "wrong")
    if not _has_lost_variety(rows[0], rows[-1]):
        return Check("diversity", "ok", f"{value}, within noise", rule, None, "wrong")
    narrower = _since_step([(int(row["step"]), _has_lost_variety(rows[0], row)) for row in rows], bool)
    return Check("diversity", "warning", value, rule, narrower, "wrong")


def _has_lost_variety(first: Row, last: Row) -> bool:
    """Whether pass@k has fallen by 2 points and, where the results of each problem are known, by more than noise."""
    if float(last["eval_pass_at_k"]) >= float(first["eval_pass_at_k"]) - 0.02:
        return False
    k = last.get("k")
    change = paired_change(first, last, k) if type(k) is int and k > 0 and first.get("k") == k else None
    return change is None or change.high < 0.0


def _means(rows: Sequence[Row], read: Callable[[Row], float | None]) -> list[tuple[int, float]]:
    """The mean of a value over the last steps, at every step that has it."""
    found: list[tuple[int, float]] = []
    recent: list[float] = []
    for row in rows:
        value = _number(read(row))
        if value is not None:
            recent = [*recent[-WINDOW + 1 :], value]
            found.append((int(row["step"]), sum(recent) / len(recent)))
    return found


def _since_step(values: Sequence[tuple[int, float]], is_beyond: Callable[[float], bool]) -> int | None:
    """The first step from which on all values are beyond a threshold; None if the last is not."""
    late = takewhile(lambda value: is_beyond(value[1]), reversed(values))
    return min((step for step, _ in late), default=None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
