"""Runs examples of an environment with the policy and returns scored groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from retrain.environments import ChatOver, Environment, Log, ManagedEnvironment, Outcome, run_rollout
from retrain.environments.chat import Limits, PolicyChat
from retrain.environments.remote import RemoteEnvironment, RolloutTimeout
from retrain.environments.template import ChatTemplate
from retrain.environments.turns import EventLoop, TurnQueue, play
from retrain.errors import RetrainError, RolloutError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.isolation.tracebacks import describe_error
from retrain.rewards import outcome_of
from retrain.rewards.batch import CORRECT_FROM
from retrain.rewards.custom import LARGEST_REWARD
from retrain.rollout import DeliverGroup, Failures, Rollouts
from retrain.runtime.clock import awake_s
from retrain.seeding import derive_seed
from retrain.types import Completion, Example, Group, IntArray, Sampling, Score, StepMetrics

# Tool servers may import a lot.
OPENING_S = 300.0
NOTE_AFTER_S = 10.0
CLOSING_S = 20.0
# Polling interval of a rollout's clock, and time for a cancelled rollout to stop.
POLL_S = 1.0
GRACE_S = 2.0
# A rollout that blocks the environment's process holds up all others until it is killed, so a batch of an environment
# that always hangs would take `timeout_s` per rollout.
MAX_HANGS = 3


@dataclass(frozen=True)
class RolloutScore(Score):
    """A score with the metrics of the environment."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    forks: int = 0
    truncated: bool = False
    context_full: bool = False


@dataclass(frozen=True)
class Rules:
    """Settings of all rollouts of a run."""

    limits: Limits
    timeout_s: float
    """Limit for the environment's own work, without time spent sampling."""
    correct_from: float = CORRECT_FROM
    """Reward from which a rollout counts as correct."""
    in_rounds: bool = False
    """Whether turns are sampled in synchronized batches, so that rounding errors are reproducible."""


class EnvironmentRunner:
    """Samples and scores with the environment's own loop."""

    def __init__(
        self, environment: Environment, template: ChatTemplate, rules: Rules, log: Log, progress: Progress
    ) -> None:
        self.environment = environment
        self.template = template
        self.rules = rules
        self.progress = progress
        self.failures = Failures("The environment", "rollouts", log)
        self.loop: EventLoop | None = None
        self.has_noted_cut = False

    def sample_and_score(
        self,
        engine: InferenceEngine,
        examples: Sequence[Example],
        sampling: Sampling,
        deliver: DeliverGroup | None = None,
    ) -> Rollouts:
        """One group per example, in order, all rollouts concurrently."""
        started = time.perf_counter()
        # All at once: a rollout may block the process that they come from.
        examples = list(examples)
        loop = self.loop or self._open()
        jobs = [example for example in examples for _ in range(sampling.n)]
        queue = TurnQueue(sampling, len(jobs), self.rules.timeout_s, self.progress)
        gathering = Gathering(examples, sampling.n, deliver, partial(self._check_early, queue, self._hangs()))
        rollouts = [gathering.add(number, self._rollout(number, example, queue)) for number, example in enumerate(jobs)]
        play(loop, engine, queue, rollouts, self.rules.in_rounds)
        self._note_cut(max((chat.cut_from for chat, _ in gathering.results.values()), default=0))
        groups = [gathering.groups[at] for at in range(len(examples))]
        self.failures.check([score for group in groups for score in group.scores_G])
        return Rollouts(groups, time.perf_counter() - started, 0.0)

    def group_metrics(self, groups: Sequence[Group]) -> StepMetrics:
        """Means of the environment's metrics, and counts of truncated and failed rollouts."""
        scores = [score for group in groups for score in group.scores_G]
        counted = [score for score in scores if isinstance(score, RolloutScore) and score.counts]
        names = sorted({name for score in counted for name in score.metrics})
        means = {f"env/{n}": _mean([score.metrics[n] for score in counted if n in score.metrics]) for n in names}
        return {
            **means,
            "turns": _mean([score.turns for score in counted]),
            "truncated": sum(score.truncated for score in counted),
            "context_hit_rate": sum(score.context_full for score in counted) / max(1, len(scores)),
            "env_forks": sum(score.forks for score in counted),
            "rollout_errors": sum(not score.counts for score in scores),
        }

    def reward_metrics(self) -> StepMetrics:
        """Always empty: the environment scores, and reports metrics with each rollout."""
        return {}

    def close(self) -> None:
        """Close the environment and stop the event loop."""
        if self.loop is None:
            return
        if isinstance(self.environment, ManagedEnvironment):
            try:
                self.loop.submit(self.environment.close()).result(timeout=CLOSING_S)
            except Exception as error:
                # The run is over; a failure to clean up does not affect its result.
                self.failures.log(f"The environment could not be closed: {error!r}")
        self.loop.close()
        self.loop = None

    def _open(self) -> EventLoop:
        """Start the event loop and open the environment in it."""
        loop = EventLoop()
        if isinstance(self.environment, ManagedEnvironment):
            try:
                self._wait_for_opening(loop.submit(self.environment.open()))
            except BaseException as error:
                loop.close()
                if not isinstance(error, Exception) or isinstance(error, RetrainError):
                    raise
                late = f"it took more than {OPENING_S:g} s" if isinstance(error, TimeoutError) else repr(error)
                raise RolloutError(f"the environment could not be started: {late}") from error
        self.loop = loop
        return loop

    def _wait_for_opening(self, opening: Future[None]) -> None:
        try:
            opening.result(timeout=NOTE_AFTER_S)
        except TimeoutError:
            if opening.done():
                raise  # the environment's own
            self.failures.log(f"Still starting the environment; the run gives up after {OPENING_S:.0f} s.")
            opening.result(timeout=OPENING_S - NOTE_AFTER_S)

    async def _rollout(self, number: int, example: Example, queue: TurnQueue) -> tuple[PolicyChat, Score]:
        clock = _Clock(self.rules.timeout_s, self._blocked_s)

        async def sample(ids: IntArray, max_tokens: int) -> Completion:
            if clock.is_over:
                raise ChatOver("the rollout was cancelled.")
            # Sampling time does not count: the engine may be busy with other rollouts.
            with clock.paused():
                return await queue.sample(number, ids, max_tokens)

        seed = derive_seed(queue.sampling.seed, "rollout", number)
        chat = PolicyChat(self.template, sample, self.rules.limits, seed)
        task = asyncio.ensure_future(self._play(example, chat))
        try:
            while not task.done() and clock.left_s > 0:
                await asyncio.wait({task}, timeout=min(clock.left_s, POLL_S))
            if not task.done():
                clock.is_over = True
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_S)
        finally:
            task.cancel()
        if clock.is_over:
            late = f"no result after {self.rules.timeout_s:g} s of the environment's own time"
            return chat, Score(0.0, "timeout", late if task.done() else f"{late}, and it could not be cancelled")
        return chat, task.result()

    async def _play(self, example: Example, chat: PolicyChat) -> Score:
        """Run one rollout and score it, whatever the environment raises."""
        try:
            return _score(await run_rollout(self.environment, example, chat), chat, self.rules.correct_from)
        except ChatOver:
            return _score(Outcome(0.0), chat, self.rules.correct_from)
        except RolloutTimeout as late:
            return Score(0.0, "timeout", f"no result after {self.rules.timeout_s:g} s: {late}")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # The last two would stop the event loop and all other rollouts.
            return _failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # This rollout was not cancelled: the error comes from inside the environment.
            return _failed(error)

    def _check_early(self, queue: TurnQueue, hangs_before: int, scores: Mapping[int, Score]) -> None:
        """Stop the batch if too many of its rollouts have failed already, or if all hang at the same point."""
        hangs = self._hangs() - hangs_before
        furthest = max(queue.asked[number] for number in scores)
        is_stuck = all(score.failed for score in scores.values()) and max(queue.asked) <= furthest
        reason = (
            f"it hung {hangs} times in a row, and no rollout got further" if is_stuck and hangs >= MAX_HANGS else ""
        )
        self.failures.check_early(list(scores.values()), len(queue.asked), reason)

    def _note_cut(self, tokens: int) -> None:
        """Say once that prompts are cut."""
        if tokens and not self.has_noted_cut:
            self.has_noted_cut, most = True, self.rules.limits.max_prompt_tokens
            self.failures.log(f"Note: [training] max_prompt_tokens = {most} cuts prompts; one has {tokens} tokens.")

    def _hangs(self) -> int:
        """How often a rollout has blocked all others until it was stopped."""
        return self.environment.hangs if isinstance(self.environment, RemoteEnvironment) else 0

    def _blocked_s(self) -> float:
        """Seconds in which one rollout blocked all others."""
        return self.environment.blocked_s() if isinstance(self.environment, RemoteEnvironment) else 0.0


class Gathering:
    """Gathers finished rollouts into groups, and delivers each group once it is complete.

    `check` gets the scores so far by rollout number; an error that it raises ends the batch.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        n: int,
        deliver: DeliverGroup | None,
        check: Callable[[Mapping[int, Score]], None],
    ) -> None:
        self.examples, self.n, self.deliver, self.check = examples, n, deliver, check
        self.results: dict[int, tuple[PolicyChat, Score]] = {}
        self.groups: dict[int, Group] = {}

    async def add(self, number: int, rollout: Coroutine[object, object, tuple[PolicyChat, Score]]) -> None:
        """Play the rollout of this number."""
        self.results[number] = await rollout
        self.check({number: score for number, (_, score) in self.results.items()})
        at = number // self.n
        members = range(at * self.n, (at + 1) * self.n)
        if all(member in self.results for member in members):
            self.groups[at] = _group(self.examples[at], [self.results[member] for member in members])
            if self.deliver is not None:
                # On another thread, so that the other rollouts continue.
                await asyncio.to_thread(self.deliver, at, self.groups[at])


class _Clock:
    """The environment's own time in one rollout; paused while the engine samples or all rollouts are blocked."""

    def __init__(self, limit_s: float, blocked_s: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self.blocked_s = blocked_s
        self.waiting = 0
        self.used_s = 0.0
        self.since = self._now()
        self.is_over = False

    def _now(self) -> float:
        return awake_s() - self.blocked_s()

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        running = 0.0 if self.waiting else self._now() - self.since
        return self.limit_s - self.used_s - running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock; reentrant."""
        if not self.waiting:
            self.used_s += self._now() - self.since
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.since = self._now()


def _score(outcome: object, chat: PolicyChat, correct_from: float) -> Score:
    if not isinstance(outcome, Outcome):
        return Score(0.0, "error", f"the environment returned {type(outcome).__name__} instead of an Outcome.")
    if not abs(outcome.reward) <= LARGEST_REWARD:
        largest = f"{LARGEST_REWARD:,.0f}"
        return Score(0.0, "error", f"the environment returned a reward of {outcome.reward}; the limit is ±{largest}.")
    if not chat.turns:
        return Score(0.0, "error", "the environment never called the model.")
    return RolloutScore(
        float(outcome.reward),
        outcome_of(outcome.reward, correct_from),
        metrics={name: float(value) for name, value in outcome.metrics.items()},
        turns=chat.turns,
        forks=max(0, len(chat.branches) - 1),
        truncated=chat.truncated or outcome.truncated,
        context_full=chat.context_full,
    )


def _failed(error: BaseException) -> Score:
    return Score(0.0, "error", describe_error(error))


def _group(example: Example, results: Sequence[tuple[PolicyChat, Score]]) -> Group:
    """The rollouts of one example. A rollout with another first prompt gets its own segment."""
    prompts = [chat.branches[0].prompt_ids for chat, _ in results if chat.branches]
    prompt = prompts[0] if prompts else np.zeros(0, np.int64)
    completions = []
    for chat, _ in results:
        completion = chat.completion()
        rows = completion.segments
        if len(rows) == 1 and np.array_equal(rows[0].prompt_ids, prompt):
            completion = replace(completion, segments=())
        completions.append(completion)
    return Group(example, prompt, tuple(completions), tuple(score for _, score in results))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
