"""Console output of a run: start-up lines, progress within a step, and steps.

On a terminal, steps are a live line that is redrawn in place; evaluations and warnings stay above it. Elsewhere, every
step is a line of its own.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from retrain.config import TrainConfig
from retrain.isolation.redaction import redact
from retrain.tracking.live import BLOCKS, LiveLine
from retrain.types import Group, StepMetrics

if TYPE_CHECKING:
    from retrain.evaluate import Evaluation

# Groups shown per step.
GROUPS_SHOWN = 2
# Seconds between progress lines without a terminal, and with one.
PLAIN_EVERY_S = 30.0
LIVE_EVERY_S = 0.1
# Scoring is reported as slow from this share of a step, and from this many seconds.
SLOW_SCORING = 0.2
SHORTEST_SCORING_S = 1.0
STEPS_UNREACHED = 5
"""Steps without a correct completion after which correct_from is explained."""
# Importance ratios that neither rounding (same weights) nor a single update (older weights) explains.
FAR_RATIO, FAR_STALE_RATIO = 2.0, 10.0
# To the beginning of the line, and erase it.
ERASE = "\r\x1b[2K"


class Console:
    """A Tracker that prints; other components print through its `print` and `progress`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # A process may have no standard output.
        self.stream: TextIO | None = stream if stream is not None else sys.stdout
        self.live = self.stream is not None and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.line = LiveLine(colored="NO_COLOR" not in os.environ, unicode=_shows_blocks(self.stream))
        self.is_drawn = False
        self.printed: set[str] = set()
        self.unreached = 0.0
        """Steps in which some reward was positive and none has ever reached correct_from."""
        self.shown_at = time.monotonic()
        self.faster_scoring = "raise [reward] workers"
        """What to do about slow scoring."""

    def print(self, line: str) -> None:
        """Print a line; replaces the progress line."""
        self._erase()
        self._write(line + "\n")

    def print_once(self, line: str) -> None:
        """Print a line unless it was printed by this before."""
        if line not in self.printed:
            self.printed.add(line)
            self.print(line)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show progress; redrawn on a terminal, printed occasionally elsewhere."""
        now = time.monotonic()
        if now - self.shown_at < (LIVE_EVERY_S if self.live else PLAIN_EVERY_S):
            return
        self.shown_at = now
        if self.live:
            self._draw(phase, done, total)
        else:
            self.print(f"  {phase} {done}/{total}")

    def start(self, config: TrainConfig) -> None:
        """Set the number of steps. Components print their own start-up lines."""
        self.faster_scoring = advise_on_scoring(config)
        self.expect(config.training.max_steps)

    def expect(self, steps: int) -> None:
        """Show progress out of this many steps."""
        self.line.total = steps

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Show the step: as the live line, or as a line of its own after the first groups."""
        self.shown_at = time.monotonic()
        if self.live:
            self._log_live(step, metrics)
        else:
            self._log_plain(step, metrics, groups)
        for line in health_lines(metrics):
            self.print(line)
        if scoring_share(metrics) >= SLOW_SCORING:
            hangs = any(score.outcome == "timeout" for group in groups for score in group.scores_G)
            limit = "some of it takes longer than [reward] timeout_s (a judge: judge_timeout_s)"
            self.print_once(f"  scoring holds up the step: {limit if hangs else self.faster_scoring} (shown once)")
        self._explain_correct_from(metrics, groups)
        if metrics["num_datums"] == 0:
            scored = metrics["mean_reward"] is not None
            why = "all groups have equal rewards" if scored else "no completion was scored"
            self.print_once(f"  {why}, so nothing was learned in this step (shown once)")
        if self.live:
            self._draw()

    def _explain_correct_from(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Say once that rewards stay below correct_from, when they have done so for some steps."""
        if float(metrics["correct_rate"] or 0) > 0 or float(metrics.get("eval_pass_at_1") or 0) > 0:
            self.unreached = -math.inf
        # With penalties, the mean may be negative although some answers are right.
        highest = max((score.value for group in groups for score in group.scores_G if score.counts), default=0.0)
        if max(highest, float(metrics["mean_reward"] or 0)) > 0:
            self.unreached += 1
        if self.unreached >= STEPS_UNREACHED:
            self.print_once(
                "  no reward has reached [reward] correct_from so far, so no completion is correct: lower it if right "
                "answers stay below it (shown once)"
            )

    def _log_live(self, step: int, metrics: StepMetrics) -> None:
        self.line.update(step, metrics)
        if metrics.get("eval_pass_at_1") is not None:
            low, high = (100 * float(metrics.get(key) or 0.0) for key in ("eval_ci_low", "eval_ci_high"))
            rate = 100 * float(metrics["eval_pass_at_1"] or 0.0)
            self.print(f"Step {step}: held-out {rate:.1f}% (95% interval {low:.1f} to {high:.1f})")

    def _log_plain(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        for group in groups[:GROUPS_SHOWN]:
            right = sum(score.outcome == "right" for score in group.scores_G)
            unscored = sum(not score.counts for score in group.scores_G)
            more = f" | {unscored} without a score" if unscored else ""
            self.print(f"  group: {right}/{len(group.scores_G)} correct | answer={group.example.reference}{more}")
        self.print(step_line(step, metrics))

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Show the evaluation after the last step in the live line."""
        self.line.held_out = evaluation.pass_at_1 if evaluation.has_scores else None

    def finish(self) -> None:
        """Keep the live line of the last step above what follows."""
        if self.live and self.line.metrics:
            self._draw()
            self._write("\n")
            self.is_drawn = False
        self._erase()

    def _draw(self, phase: str = "", done: int = 0, total: int = 0) -> None:
        # One column less: some terminals wrap a full line.
        text = self.line.text(shutil.get_terminal_size().columns - 1, phase, done, total)
        self._write(ERASE + text)
        self.is_drawn = True

    def _erase(self) -> None:
        if self.is_drawn:
            self._write(ERASE)
            self.is_drawn = False

    def _write(self, text: str) -> None:
        """Write; a closed output does not end the run."""
        if self.stream is None:
            return
        # Rewards, environments and servers write much of it.
        text = redact(text)
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError as error:
                # Nothing of it was written.
                self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            self.stream.flush()
        except (OSError, ValueError):
            self.stream = None


def step_line(step: int, metrics: StepMetrics) -> str:
    """The step in one line."""
    late = " (placeholder)" if metrics["loss_is_placeholder"] else ""
    parts = [
        f"Step {step} [{metrics['condition']}]",
        f"loss={metrics['loss']:z.4f}{late}",
        *_rewards(metrics),
        f"datums={metrics['num_datums']}",
        f"bs={metrics['batch_size']}",
        f"gs={metrics['group_size']}",
        f"sepa_l={metrics['sepa_lambda']:.4f}",
        f"time={metrics['step_time_s']:.1f}s",
    ]
    if (share := scoring_share(metrics)) >= SLOW_SCORING:
        parts.append(f"scoring={100 * share:.0f}%")
    if metrics.get("eval_pass_at_1") is not None:
        parts.insert(4, f"held-out={100 * float(metrics['eval_pass_at_1'] or 0):.1f}%")
    return " | ".join(parts)


def _rewards(metrics: StepMetrics) -> tuple[str, str]:
    reward, rate = metrics["mean_reward"], metrics["correct_rate"]
    if reward is None or rate is None:
        return "reward=none", "correct=none"
    return f"reward={reward:.3f}", f"correct={100 * float(rate):.1f}%"


def health_lines(metrics: StepMetrics) -> list[str]:
    """Warnings about the step's metrics."""
    lines = []
    ratio, stale = float(metrics.get("ratio_max") or 1.0), bool(metrics.get("staleness"))
    if ratio > (FAR_STALE_RATIO if stale else FAR_RATIO):
        why = "more than one update should move it" if stale else "though sampler and trainer have the same weights"
        lines.append(f"  Warning: ratio_max={ratio:.1f} is far from 1, {why}")
    if excluded := int(metrics.get("rows_excluded") or 0):
        lines.append(
            f"  Warning: {excluded} of {metrics['rows_checked']} rows excluded: the sampler's log-probs differ by up "
            f"to {float(metrics['rows_mismatch_max'] or 0):.3g} from the trainer's"
        )
    return lines


def advise_on_scoring(config: TrainConfig) -> str:
    """What could make the scoring of a run faster."""
    types = {term.type for term in config.reward.terms} or {config.reward.type}
    if "judge" not in types:
        return "raise [reward] workers"
    others = ", or workers for the other rewards" if len(types) > 1 else ""
    if config.reward.judge_concurrency < config.training.batch_size * config.training.group_size:
        return f"raise [reward] judge_concurrency, unless the judge limits its rate{others}"
    return f"all requests to the judge are sent at once, so its speed or its rate limit decides{others}"


def scoring_share(metrics: StepMetrics) -> float:
    """Share of the step spent on scoring; 0 if negligible."""
    seconds = float(metrics.get("score_time_s") or 0.0)
    return seconds / float(metrics["step_time_s"] or seconds) if seconds >= SHORTEST_SCORING_S else 0.0


def _shows_blocks(stream: TextIO | None) -> bool:
    try:
        BLOCKS.encode((stream and stream.encoding) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
