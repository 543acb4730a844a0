"""The live line of a run on a terminal: progress, results and time, redrawn in place."""

from __future__ import annotations

from collections import deque

from retrain.runtime.text import format_clock
from retrain.types import StepMetrics

BLOCKS = "▁▂▃▄▅▆▇█"
# Steps of the small curve, and of the mean step time.
CURVE, RECENT = 8, 10
BAR = 16
GREEN, YELLOW, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
# Share of truncated completions that is highlighted.
MANY_CUT = 0.1


class LiveLine:
    """What is known of a run, as one line that fits the terminal."""

    def __init__(self, colored: bool = True, unicode: bool = True) -> None:
        self.colored, self.unicode = colored, unicode
        self.total = 0
        self.done = 0
        self.rates: deque[float] = deque(maxlen=CURVE)
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.held_out: float | None = None
        self.metrics: StepMetrics = {}

    def update(self, step: int, metrics: StepMetrics) -> None:
        """Add a step."""
        self.done, self.metrics = step + 1, metrics
        if metrics["correct_rate"] is not None:
            self.rates.append(float(metrics["correct_rate"]))
        self.seconds.append(float(metrics["step_time_s"] or 0.0))
        if metrics.get("eval_pass_at_1") is not None:
            self.held_out = float(metrics["eval_pass_at_1"] or 0.0)

    def text(self, width: int, phase: str = "", done: int = 0, count: int = 0) -> str:
        """The line, with a bar for the current phase if there is one; parts that do not fit are left out."""
        parts = [(f"{self.done}/{self.total}", "")] if self.total else []
        if self.rates and self.unicode:
            parts.append(("".join(BLOCKS[min(7, int(8 * rate))] for rate in self.rates), GREEN))
        if self.rates and self.metrics.get("correct_rate") is not None:
            parts.append((f"correct {100 * self.rates[-1]:.0f}%", ""))
        if self.held_out is not None:
            parts.append((f"held-out {100 * self.held_out:.0f}%", GREEN))
        if phase:
            parts += [(phase, DIM), *self._bar(done, count), (f"{done}/{count}", "")]
        elif self.metrics:
            parts += self._details()
        return self._join(parts, width)

    def _details(self) -> list[tuple[str, str]]:
        length, cut = self.metrics.get("completion_tokens_mean"), float(self.metrics.get("max_token_hit_rate") or 0.0)
        parts = [(f"len {float(length):.0f}", "")] if length is not None else []
        parts.append((f"cut {100 * cut:.0f}%", YELLOW if cut >= MANY_CUT else ""))
        mean = sum(self.seconds) / len(self.seconds)
        parts.append((f"{mean:.1f}s/step", DIM))
        if self.total > self.done:
            parts.append((f"ETA {format_clock(mean * (self.total - self.done))}", ""))
        return parts

    def _bar(self, done: int, count: int) -> list[tuple[str, str]]:
        if not count:
            return []
        full = min(BAR, BAR * done // count)
        ahead, behind = ("━", "╌") if self.unicode else ("#", "-")
        return [(ahead * full + behind * (BAR - full), GREEN)]

    def _join(self, parts: list[tuple[str, str]], width: int) -> str:
        shown, room = [], width
        for text, color in parts:
            if len(text) > room:
                break
            shown.append(f"{color}{text}{RESET}" if color and self.colored else text)
            room -= len(text) + 1
        return " ".join(shown)
