"""What a run says on the screen: start-up lines, progress inside a step, and one line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from retrain.config import TrainConfig
from retrain.isolation.redaction import redact
from retrain.types import Group, StepMetrics

# Groups shown a step: enough to see what the model is asked, not so many that the step lines drown.
GROUPS_SHOWN = 2
# Seconds between progress lines where there is no terminal to redraw.
PLAIN_EVERY_S = 30.0
LIVE_EVERY_S = 0.1
# The share of a step from which scoring is shown as what holds it up, unless it took less than this long.
SLOW_SCORING = 0.2
SHORTEST_SCORING_S = 1.0
# Importance ratios beyond this are no rounding on fresh weights, and no single update on older ones.
FAR_RATIO, FAR_STALE_RATIO = 2.0, 10.0


class Console:
    """A Tracker that prints, and the `say` and `progress` that the other parts are given."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # A program started without a standard output has none at all.
        self.stream: TextIO | None = stream if stream is not None else sys.stdout
        self.live = self.stream is not None and self.stream.isatty()
        self.drawn = 0
        self.warned = False
        self.warned_of_scoring = False
        self.shown_at = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, in place of a progress line if one stands there."""
        self._erase()
        self._write(line + "\n")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase is; redraws on a terminal, speaks up now and then elsewhere."""
        now = time.monotonic()
        if now - self.shown_at < (LIVE_EVERY_S if self.live else PLAIN_EVERY_S):
            return
        self.shown_at = now
        text = f"  {phase} {done}/{total}"
        if not self.live:
            self.say(text)
            return
        self._erase()
        self._write(text)
        self.drawn = len(text)

    def start(self, config: TrainConfig) -> None:
        """Nothing: the start-up lines are said by the parts as they load."""

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """A line for the first few groups, then the step's."""
        self.shown_at = time.monotonic()
        for group in groups[:GROUPS_SHOWN]:
            right = sum(score.outcome == "right" for score in group.scores_G)
            unscored = sum(not score.counts for score in group.scores_G)
            more = f" | {unscored} without a score" if unscored else ""
            self.say(f"  group: {right}/{len(group.scores_G)} correct | answer={group.example.reference}{more}")
        self.say(step_line(step, metrics))
        for line in health_lines(metrics):
            self.say(line)
        if scoring_share(metrics) >= SLOW_SCORING and not self.warned_of_scoring:
            self.warned_of_scoring = True
            self.say("  scoring holds up the step: raise [reward] workers (a judge: judge_concurrency; shown once)")
        if metrics["num_datums"] == 0 and not self.warned:
            self.warned = True
            self.say("  no group had both better and worse answers, so nothing was learnt (said once)")

    def finish(self) -> None:
        """Leave the cursor on a fresh line."""
        self._erase()

    def _erase(self) -> None:
        if self.drawn:
            self._write("\r" + " " * self.drawn + "\r")
            self.drawn = 0

    def _write(self, text: str) -> None:
        """Nobody may be listening any more; a run does not end for that."""
        if self.stream is None:
            return
        try:
            # Much of it was written by rewards, environments and servers.
            self.stream.write(redact(text))
            self.stream.flush()
        except (OSError, ValueError):
            self.stream = None


def step_line(step: int, metrics: StepMetrics) -> str:
    """The step in one line."""
    late = " (placeholder)" if metrics["loss_is_placeholder"] else ""
    parts = [
        f"Step {step} [{metrics['condition']}]",
        f"loss={metrics['loss']:.4f}{late}",
        f"reward={metrics['mean_reward']:.3f}",
        f"correct={100 * float(metrics['correct_rate'] or 0):.1f}%",
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


def health_lines(metrics: StepMetrics) -> list[str]:
    """What of the step's numbers should worry whoever reads it."""
    lines = []
    ratio, stale = float(metrics.get("ratio_max") or 1.0), bool(metrics.get("staleness"))
    if ratio > (FAR_STALE_RATIO if stale else FAR_RATIO):
        why = "more than one update should move it" if stale else "though sampler and trainer have the same weights"
        lines.append(f"  Warning: ratio_max={ratio:.1f} is far from 1, {why}")
    if left_out := int(metrics.get("rows_excluded") or 0):
        lines.append(
            f"  Warning: {left_out} of {metrics['rows_checked']} rows left out: the sampler's log-probs are up to "
            f"{float(metrics['rows_mismatch_max'] or 0):.3g} from the trainer's"
        )
    return lines


def scoring_share(metrics: StepMetrics) -> float:
    """Which part of the step was spent on scoring; 0 where that is too short to matter."""
    seconds = float(metrics.get("score_time_s") or 0.0)
    return seconds / float(metrics["step_time_s"] or seconds) if seconds >= SHORTEST_SCORING_S else 0.0
