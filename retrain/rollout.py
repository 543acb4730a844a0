"""Rollouts: sample completions for examples, score them, and replace groups without a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from retrain.data import ExampleOrder
from retrain.errors import RolloutError
from retrain.inference_engine import IncrementalEngine, InferenceEngine, Progress
from retrain.modeling.tokens import PromptEncoder
from retrain.rewards import BatchReward, Item
from retrain.seeding import derive_seed
from retrain.types import Completion, Example, Group, Metric, Sampling, Score

# Beyond this share of failed scores the rest is not representative.
MAX_ERROR_RATE = 0.5

DeliverGroup = Callable[[int, Group], None]
"""Called with the number of a group and the scored group, early and in any order; the thread may be another one. The
group is not final before all of them are returned: an engine may still be found to have sampled wrongly."""


@dataclass(frozen=True)
class Rollouts:
    """The scored groups of one step, and their timings."""

    groups: list[Group]
    sample_time_s: float
    score_time_s: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Additional metrics of the scorer."""
    places: Sequence[int] = ()
    """The place of each group's prompt among those that the step asked; empty if the groups are in that order."""

    def as_asked(self, groups: Sequence[Group]) -> list[Group]:
        """These versions of the groups, in the order in which the step asked their prompts."""
        places = self.places or range(len(groups))
        return [groups[at] for at in sorted(range(len(groups)), key=places.__getitem__)]

    @property
    def scores(self) -> list[Score]:
        """All valid scores."""
        return [score for group in self.groups for score in group.scores_G if score.counts]

    @property
    def errors(self) -> int:
        """Number of failed scores."""
        return sum(score.failed for group in self.groups for score in group.scores_G)

    @property
    def mean_reward(self) -> float | None:
        """Mean of the valid scores; None if there is none."""
        scores = self.scores
        return sum(score.value for score in scores) / len(scores) if scores else None

    @property
    def correct_rate(self) -> float | None:
        """Share of correct completions among the valid scores; None if there is none."""
        scores = self.scores
        return sum(score.outcome == "right" for score in scores) / len(scores) if scores else None


class RolloutSource(Protocol):
    """Collects the groups of a step."""

    def collect(
        self, engine: InferenceEngine, step: int, batch_size: int, deliver: DeliverGroup | None = None
    ) -> Rollouts:
        """Sample and score the groups of one step; `deliver` gets each as early as possible."""


class RolloutScorer(Protocol):
    """Samples and scores completions: single-turn, or in an environment."""

    failures: Failures

    def sample_and_score(
        self,
        engine: InferenceEngine,
        examples: Sequence[Example],
        sampling: Sampling,
        deliver: DeliverGroup | None = None,
    ) -> Rollouts:
        """One group of `sampling.n` completions per example, in order; `deliver` gets each as early as possible."""

    def group_metrics(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """Additional metrics of a step's groups."""

    def reward_metrics(self) -> Mapping[str, Metric]:
        """Metrics of scoring since the last call, such as the requests to a judge."""


class GroupCollector:
    """Samples a step's groups, and resamples groups without a signal."""

    def __init__(
        self, order: ExampleOrder, scorer: RolloutScorer, sampling: Sampling, seed: int, resample_rounds: int = 0
    ) -> None:
        self.order = order
        self.scorer = scorer
        self.sampling = sampling
        self.seed = seed
        self.resample_rounds = resample_rounds

    def collect(
        self, engine: InferenceEngine, step: int, batch_size: int, deliver: DeliverGroup | None = None
    ) -> Rollouts:
        """Sample `batch_size` prompts; groups without a signal are replaced for up to `resample_rounds`."""
        asked: list[Group] = []
        live = 0
        sample_time = score_time = 0.0
        failures = self.scorer.failures
        with failures.in_parts():
            for round_ in range(1 + self.resample_rounds):
                examples = self.order.take(batch_size - live)
                failures.expect(len(examples) * self.sampling.n)
                sampling = replace(self.sampling, seed=derive_seed(self.seed, f"sampling/{round_}", step))
                drawn = self.scorer.sample_and_score(engine, examples, sampling, numbered_from(len(asked), deliver))
                sample_time += drawn.sample_time_s
                score_time += drawn.score_time_s
                asked += drawn.groups
                live = sum(map(has_signal, asked))
                if live == batch_size:
                    break
        # Groups without a signal are kept for metrics and logs, after the others.
        places = sorted(range(len(asked)), key=lambda at: not has_signal(asked[at]))
        groups = [asked[at] for at in places]
        metrics = {**self.scorer.reward_metrics(), **self.scorer.group_metrics(groups)}
        return Rollouts(groups, sample_time, score_time, metrics, places)


class Scorer:
    """Samples a group of completions per prompt and scores them with the reward."""

    def __init__(
        self, encoder: PromptEncoder, reward: BatchReward, log: Callable[[str], None], progress: Progress
    ) -> None:
        self.encoder = encoder
        self.reward = reward
        self.progress = progress
        self.failures = Failures("Scoring", "completions", log)

    def sample_and_score(
        self,
        engine: InferenceEngine,
        examples: Sequence[Example],
        sampling: Sampling,
        deliver: DeliverGroup | None = None,
    ) -> Rollouts:
        """One group per example, in order."""
        started = time.perf_counter()
        unscored = [Group(example, self.encoder.encode(example), ()) for example in examples]
        prompts = [group.prompt_ids for group in unscored]
        if deliver is not None and isinstance(engine, IncrementalEngine):
            with EarlyScores(self._score, unscored, deliver) as early:
                completions_PG = engine.generate_each(prompts, sampling, early.add)
                check_completions(engine, completions_PG, len(prompts), sampling.n)
                sampled = time.perf_counter()
            groups = [early.groups[at] for at in range(len(prompts))]
        else:
            completions_PG = engine.generate(prompts, sampling)
            check_completions(engine, completions_PG, len(prompts), sampling.n)
            sampled = time.perf_counter()
            self.progress("scoring", 0, sum(map(len, completions_PG)))
            groups = self._score(
                [replace(group, completions_G=tuple(c)) for group, c in zip(unscored, completions_PG, strict=True)]
            )
        self.failures.check([score for group in groups for score in group.scores_G])
        return Rollouts(groups, sampled - started, time.perf_counter() - sampled)

    def _score(self, groups: Sequence[Group]) -> list[Group]:
        items = [
            Item(completion.text, example.reference, example.prompt, example.meta, completion.token_ids_T)
            for example, completions in ((group.example, group.completions_G) for group in groups)
            for completion in completions
        ]
        scores = iter(self.reward.score(items))
        return [replace(group, scores_G=tuple(islice(scores, len(group.completions_G)))) for group in groups]

    def group_metrics(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """Always empty: there are no metrics besides those of every step."""
        return {}

    def reward_metrics(self) -> Mapping[str, Metric]:
        """Metrics of the reward."""
        return self.reward.metrics()


class ChunkedScorer:
    """Samples and scores at most `at_once` examples at a time."""

    def __init__(self, scorer: RolloutScorer, at_once: int) -> None:
        self.scorer = scorer
        self.failures = scorer.failures
        self.at_once = at_once

    def sample_and_score(
        self,
        engine: InferenceEngine,
        examples: Sequence[Example],
        sampling: Sampling,
        deliver: DeliverGroup | None = None,
    ) -> Rollouts:
        """Chunk by chunk, each with its own seed."""
        parts = [
            self.scorer.sample_and_score(
                engine,
                examples[at : at + self.at_once],
                replace(sampling, seed=derive_seed(sampling.seed, "part", at)),
                numbered_from(at, deliver),
            )
            for at in range(0, len(examples), self.at_once)
        ]
        groups = [group for part in parts for group in part.groups]
        return Rollouts(groups, sum(part.sample_time_s for part in parts), sum(part.score_time_s for part in parts))

    def group_metrics(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """Metrics of the wrapped scorer."""
        return self.scorer.group_metrics(groups)

    def reward_metrics(self) -> Mapping[str, Metric]:
        """Metrics of its scoring."""
        return self.scorer.reward_metrics()


class EarlyScores:
    """Scores groups on a thread as their completions arrive; each call scores all that have arrived so far."""

    def __init__(
        self, score: Callable[[Sequence[Group]], list[Group]], unscored: Sequence[Group], deliver: DeliverGroup
    ) -> None:
        self.score, self.unscored, self.deliver = score, unscored, deliver
        self.arrived: SimpleQueue[tuple[int, list[Completion]]] = SimpleQueue()
        self.thread = ThreadPoolExecutor(1, "retrain-scores")
        self.jobs: list[Future[None]] = []
        self.groups: dict[int, Group] = {}
        """The scored groups by number."""

    def __enter__(self) -> Self:
        return self

    def add(self, at: int, completions: list[Completion]) -> None:
        """Queue a group for scoring."""
        self.arrived.put((at, completions))
        self.jobs.append(self.thread.submit(self._score_arrived))

    def _score_arrived(self) -> None:
        arrived = [self.arrived.get() for _ in range(self.arrived.qsize())]
        groups = self.score([replace(self.unscored[at], completions_G=tuple(c)) for at, c in arrived])
        for (at, _), group in zip(arrived, groups, strict=True):
            self.groups[at] = group
            self.deliver(at, group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for job in self.jobs:
                job.result()


def numbered_from(first: int, deliver: DeliverGroup | None) -> DeliverGroup | None:
    """`deliver` for a part of a larger batch, whose first group has this number."""
    return None if deliver is None else lambda at, group: deliver(first + at, group)


class Failures:
    """Prints the first failure in full, and stops the run if most scores fail or nothing is ever scored.

    Evaluations have a first failure of their own, because it counts elsewhere than those of training.
    """

    def __init__(self, what: str, things: str, log: Callable[[str], None]) -> None:
        self.what = what
        self.things = things
        self.log = log
        self.place = ""
        self.shown: set[str] = set()
        """The places whose first failure was printed."""
        self.noted: set[str] = set()
        """The places where rewards of None were pointed out."""
        self.has_scored = False
        self.expected: int | None = None
        """Scores of the batch that is checked in parts; None if each check is of a whole batch."""
        self.checked: list[Score] = []
        """Those of its earlier parts."""

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Checks meanwhile are of parts of one batch: one bad problem may be a whole part."""
        self.expected = 0
        try:
            yield
            self._check_none(self.checked)
        finally:
            self.expected, self.checked = None, []

    def expect(self, count: int) -> None:
        """The batch that is checked in parts has this many scores more."""
        self.expected = (self.expected or 0) + count

    @contextmanager
    def during(self, place: str) -> Iterator[None]:
        """Messages meanwhile say where it happened, such as `in the evaluation`."""
        self.place = f" {place}"
        try:
            yield
        finally:
            self.place = ""

    def check(self, scores: Sequence[Score]) -> None:
        """Check the scores of one batch, or of a part of it."""
        self.check_early(scores, len(scores))
        self._show([*self.checked, *scores], self._total(len(scores)))
        self.has_scored = self.has_scored or any(score.counts for score in scores)
        if self.expected is None:
            self._check_none(scores)
        else:
            self.checked += scores

    def _total(self, part: int) -> int:
        """Scores of the batch of which this many are checked now."""
        return max(self.expected or 0, len(self.checked) + part)

    def _check_none(self, scores: Sequence[Score]) -> None:
        """Point out once that rewards of a batch are None; stop if there has been no other one."""
        none = sum(score.outcome == "none" for score in scores)
        if none and self.has_scored and self.place not in self.noted:
            self.noted.add(self.place)
            self.log(
                f"The reward returned None for {none} of {len(scores)} {self.things}{self.place}. They count in no "
                "rate and are not trained on; for a wrong answer, return 0.0 (shown once)."
            )
        if scores and not self.has_scored and not any(score.failed for score in scores):
            raise RolloutError(
                f"the reward returned None for all {len(scores)} {self.things}{self.place}, so there is nothing to "
                "learn from.  "
                "Try: return a number for those that it applies to"
            )

    def check_early(self, scores: Sequence[Score], total: int, gives_up: str = "") -> None:
        """Check the scores so far of a batch of `total`: stop once too many have failed, whatever the others will be.

        `gives_up` is a reason not to wait for the others although they could still succeed; those of other parts could.
        """
        part, total = total, self._total(total)
        scores = [*self.checked, *scores]
        failed = [score for score in scores if score.failed]
        if len(failed) > MAX_ERROR_RATE * total:
            gives_up = f"if more than {MAX_ERROR_RATE:.0%} fail, the run stops"
        elif part < total:
            gives_up = ""
        if gives_up:
            self._show(scores, total)
            why = (failed[0].detail.strip() or failed[0].outcome).splitlines()[0]
            what = self.what[0].lower() + self.what[1:]
            things = self._things(len(scores) < total)
            why, _, hint = why.partition("  Try: ")
            raise RolloutError(
                f"{what} failed for {len(failed)} of {total} {things} ({failed[0].outcome}: {why}); "
                f"{gives_up}.  Try: {hint or 'retrain man --topic reward-errors'}"
            )

    def _things(self, more_come: bool) -> str:
        return f"{self.things}{self.place}{' so far' if more_come else ''}"

    def _show(self, scores: Sequence[Score], total: int) -> None:
        failed = [score for score in scores if score.failed]
        if failed and self.place not in self.shown:
            self.shown.add(self.place)
            things = self._things(len(scores) < total)
            self.log(f"{self.what} failed for {len(failed)} of {total} {things}; they are excluded. The first one:")
            self.log(failed[0].detail.rstrip() or failed[0].outcome)


def check_completions(engine: InferenceEngine, completions_PG: object, prompts: int, n: int) -> None:
    """Check that an engine returned `n` valid completions for each prompt."""
    engine_name = f"the inference engine {type(engine).__module__}.{type(engine).__qualname__}"
    for group, completions in enumerate(_of_length(completions_PG, prompts, engine_name, f"{prompts} prompts")):
        place = f"prompt {group}"
        for index, completion in enumerate(_of_length(completions, n, engine_name, f"n = {n} at {place}")):
            _check_completion(completion, f"{engine_name} returned, at {place}, completion {index},")


def _of_length(values: object, length: int, who: str, wanted: str) -> Sequence[object]:
    if not isinstance(values, Sequence):
        raise RolloutError(f"{who} returned a {type(values).__name__} for {wanted}; expected a list.")
    if len(values) != length:
        raise RolloutError(f"{who} returned a list of {len(values)} for {wanted}.")
    return values


def _check_completion(completion: object, returned: str) -> None:
    if not isinstance(completion, Completion):
        raise RolloutError(f"{returned} a {type(completion).__name__}; expected a retrain.types.Completion.")
    tokens = np.shape(completion.token_ids_T)
    if len(tokens) != 1:
        raise RolloutError(f"{returned} token ids of shape {tokens}; expected one row.")
    optional = (("entropies", completion.entropies_T), ("a sampled mask", completion.sampled_T))
    arrays = [("log-probs", completion.logprobs_T), *((what, array) for what, array in optional if array is not None)]
    for what, array in arrays:
        if np.shape(array) != tokens:
            raise RolloutError(f"{returned} {what} of shape {np.shape(array)} for {tokens[0]} tokens.")


def has_signal(group: Group) -> bool:
    """Whether the valid scores of a group differ."""
    return len({score.value for score in group.scores_G if score.counts}) > 1
