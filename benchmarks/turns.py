"""What does one turn of a conversation cost beside sampling: template, tokens, event loop and the environment's bridge?

    python benchmarks/turns.py

64 rollouts at once of eight turns each, answered by an engine that takes no time, with the embedded tokenizer: an
environment of our own, and a verifiers one by whichever API is installed, each in this process and, as runs have it, in
a process of its own. CPU time is that of this process; it is what the bound is about. Exits 1 when a turn costs more.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from retrain.config import schema
from retrain.environments import Chat, Environment, Log, Outcome, build_environment
from retrain.environments.chat import Limits
from retrain.environments.remote import RemoteEnvironment
from retrain.environments.runner import EnvironmentRunner, Rules
from retrain.environments.template import ChatTemplate
from retrain.environments.verifiers import FIRST_WITHOUT_CLASSIC
from retrain.environments.verifiers.modules import installed_version
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Completion, Example, IntArray, Sampling

ROLLOUTS, TURNS, REPEATS = 64, 8, 3
MOST_MS = 15.0
PACKAGES = Path(__file__).parents[1] / "tests" / "environments" / "packages"
WRONG = "4+4=8. \\boxed{99}"


class Instant:
    """An engine that always gives the same wrong answer, so that every rollout takes all its turns."""

    def __init__(self, tokenizer: Any) -> None:
        ids = [*tokenizer(WRONG, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self.completion = Completion(np.array(ids), np.zeros(len(ids), np.float32), WRONG, "stop")

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        return [[self.completion] * sampling.n for _ in prompts]

    def sync(self, weights: object) -> None: ...

    def shutdown(self) -> None: ...


class Asks:
    """An environment that only asks."""

    def __init__(self, section: schema.Environment, log: Log) -> None: ...

    def examples(self, split: str) -> Sequence[Example]:
        return [Example("4+4=?", "8", id="0")]

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        for _ in range(TURNS):
            await chat.ask("4+4=?")
        return Outcome(0.0)


def measure(environment: Environment, tokenizer: Any) -> tuple[int, float, float]:
    """How many turns a batch had, and milliseconds a turn of CPU and of wall clock, each the best of a few batches."""
    rules = Rules(Limits(max_tokens=64, context=4096, max_turns=TURNS), timeout_s=300)
    player = EnvironmentRunner(environment, ChatTemplate(tokenizer), rules, lambda _: None, lambda *_: None)
    examples, engine = environment.examples("train")[:1], Instant(tokenizer)
    times, turns = [], 0
    for _ in range(1 + REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        (group,) = player.sample_and_score(engine, examples, Sampling(max_tokens=64, n=ROLLOUTS)).groups
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
        turns = int(player.group_metrics([group])["turns"] or 0) * ROLLOUTS  # type: ignore[call-overload]
    player.close()
    if isinstance(environment, RemoteEnvironment):
        environment.end()
    cpu, wall = (1000 * min(column) / turns for column in zip(*times[1:], strict=True))
    return turns, cpu, wall


def main() -> int:
    """Print one table."""
    tokenizer = load_tokenizer("builtin:tiny")
    generation = "v1" if installed_version() >= FIRST_WITHOUT_CLASSIC else "classic"
    paths = [str(PACKAGES / generation), str(Path(__file__).parent)]
    sections = {
        "our own": schema.Environment(provider="turns.Asks"),
        f"verifiers ({generation})": schema.Environment(provider="verifiers", id="wordle", max_turns=TURNS),
    }
    print(f"{ROLLOUTS} rollouts at once, {TURNS} turns each")
    print(f"{'environment':<26} {'turns':>6} {'CPU ms a turn':>14} {'wall ms a turn':>15}")
    worst = 0.0
    for name, section in sections.items():
        for where, make in (("here", build_environment), ("remote", RemoteEnvironment)):
            turns, cpu, wall = measure(make(section, paths, lambda _: None), tokenizer)
            worst = max(worst, cpu)
            print(f"{f'{name}, {where}':<26} {turns:>6} {cpu:>14.2f} {wall:>15.2f}")
    print(f"bound: {MOST_MS} ms a turn")
    return int(worst > MOST_MS)


if __name__ == "__main__":
    sys.exit(main())
