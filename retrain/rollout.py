"""Examples into scored groups: draw prompts, sample, score, and replace groups that teach nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from retrain.data import ExampleOrder
from retrain.errors import RolloutError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.modeling.tokens import PromptEncoder
from retrain.rewards import BatchReward, Item
from retrain.seeding import derive_seed
from retrain.types import Completion, Example, Group, Metric, Sampling, Score

# Beyond this share of failed scores the rest says little about the policy.
MAX_ERROR_RATE = 0.5


@dataclass(frozen=True)
class Rollouts:
    """The scored groups of one step, and what they cost."""

    groups: list[Group]
    sample_time_s: float
    score_time_s: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What the source of the groups has to say of them, for the step's metrics."""

    @property
    def scores(self) -> list[Score]:
        """Every score that counts."""
        return [score for group in self.groups for score in group.scores_G if score.counts]

    @property
    def errors(self) -> int:
        """Scores that failed."""
        return sum(score.failed for group in self.groups for score in group.scores_G)

    @property
    def correct_rate(self) -> float:
        """Share of right answers among the scores that count."""
        scores = self.scores
        return sum(score.outcome == "right" for score in scores) / len(scores) if scores else 0.0


class RolloutSource(Protocol):
    """Where a step's groups come from: single-turn sampling, or an environment."""

    def collect(self, engine: InferenceEngine, step: int, batch_size: int) -> Rollouts:
        """Sample and score the groups of one step."""
        ...


class SamplesAndScores(Protocol):
    """Turns examples into scored groups: by one answer each, or by an environment's own loop."""

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One group of `sampling.n` an example, in order."""
        ...

    def describe(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """What else is to be logged of a step's groups."""
        ...


class GroupCollector:
    """Draws a step's examples, and fresh ones in place of those that taught nothing."""

    def __init__(
        self, order: ExampleOrder, scorer: SamplesAndScores, sampling: Sampling, seed: int, resample_rounds: int = 0
    ) -> None:
        self.order = order
        self.scorer = scorer
        self.sampling = sampling
        self.seed = seed
        self.resample_rounds = resample_rounds

    def collect(self, engine: InferenceEngine, step: int, batch_size: int) -> Rollouts:
        """Sample `batch_size` prompts; groups without signal are replaced by fresh prompts for a few rounds."""
        kept: list[Group] = []
        dead: list[Group] = []
        sample_time = score_time = 0.0
        for round_ in range(1 + self.resample_rounds):
            examples = self.order.take(batch_size - len(kept))
            sampling = replace(self.sampling, seed=derive_seed(self.seed, f"sampling/{round_}", step))
            drawn = self.scorer.sample_and_score(engine, examples, sampling)
            sample_time += drawn.sample_time_s
            score_time += drawn.score_time_s
            live = [group for group in drawn.groups if has_signal(group)]
            dead += [group for group in drawn.groups if not has_signal(group)]
            kept += live
            if len(kept) == batch_size:
                break
        # Dead groups stay in the record: they are part of what the policy can and cannot do.
        groups = kept + dead
        return Rollouts(groups, sample_time, score_time, self.scorer.describe(groups))


class Scorer:
    """Samples and scores a list of examples; training and evaluation both go through it."""

    def __init__(
        self, encoder: PromptEncoder, reward: BatchReward, say: Callable[[str], None], progress: Progress
    ) -> None:
        self.encoder = encoder
        self.reward = reward
        self.progress = progress
        self.failures = Failures("Scoring", "completions", say)

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One group an example, in order."""
        started = time.perf_counter()
        prompts = [self.encoder.encode(example) for example in examples]
        completions_PG = engine.generate(prompts, sampling)
        check_completions(engine, completions_PG, len(prompts), sampling.n)
        sampled = time.perf_counter()
        self.progress("scoring", 0, sum(map(len, completions_PG)))
        items = [
            Item(completion.text, example.reference, example.prompt, example.meta, completion.token_ids_T)
            for example, group in zip(examples, completions_PG, strict=True)
            for completion in group
        ]
        scores = self.reward.score(items)
        self.failures.mind(scores)
        groups, at = [], 0
        for example, prompt, completions in zip(examples, prompts, completions_PG, strict=True):
            own = tuple(scores[at : at + len(completions)])
            groups.append(Group(example, prompt, tuple(completions), own))
            at += len(completions)
        return Rollouts(groups, sampled - started, time.perf_counter() - sampled)

    def describe(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """What scoring cost since the last step, an evaluation between them included."""
        return self.reward.metrics()


class InParts:
    """Samples and scores at most so many examples at one time."""

    def __init__(self, scorer: SamplesAndScores, at_once: int) -> None:
        self.scorer = scorer
        self.at_once = at_once

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One part after the other, each with random numbers of its own."""
        parts = [
            self.scorer.sample_and_score(
                engine, examples[at : at + self.at_once], replace(sampling, seed=derive_seed(sampling.seed, "part", at))
            )
            for at in range(0, len(examples), self.at_once)
        ]
        groups = [group for part in parts for group in part.groups]
        return Rollouts(groups, sum(part.sample_time_s for part in parts), sum(part.score_time_s for part in parts))

    def describe(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """What the scorer tells of all of them."""
        return self.scorer.describe(groups)


class Failures:
    """Shows the first failure in full, and stops a run when failures outnumber scores or nothing is ever scored."""

    def __init__(self, what: str, things: str, say: Callable[[str], None]) -> None:
        self.what = what
        self.things = things
        self.say = say
        self.shown = False
        self.has_scored = False

    def mind(self, scores: Sequence[Score]) -> None:
        """Look at the scores of one batch."""
        failed = [score for score in scores if score.failed]
        if failed and not self.shown:
            self.shown = True
            of = f"{len(failed)} of {len(scores)} {self.things}"
            self.say(f"{self.what} failed for {of}; they are left out. The first one:")
            self.say(failed[0].detail.rstrip() or failed[0].outcome)
        if len(failed) > MAX_ERROR_RATE * len(scores):
            why = (failed[0].detail.strip() or failed[0].outcome).splitlines()[0]
            what = self.what[0].lower() + self.what[1:]
            raise RolloutError(
                f"{what} failed for {len(failed)} of {len(scores)} {self.things} ({failed[0].outcome}: {why})."
            )
        self.has_scored = self.has_scored or any(score.counts for score in scores)
        if scores and not self.has_scored and not failed:
            raise RolloutError(
                f"the reward returned None for all {len(scores)} {self.things}, so there is nothing to learn from.  "
                "Try: return a number for those that it applies to"
            )


def check_completions(engine: InferenceEngine, completions_PG: object, prompts: int, n: int) -> None:
    """Refuse what an engine returned unless it is `n` whole completions for each prompt: the rest would shift."""
    who = f"the inference engine {type(engine).__module__}.{type(engine).__qualname__}"
    for group, completions in enumerate(_of_length(completions_PG, prompts, who, f"{prompts} prompts")):
        place = f"prompt {group}"
        for index, completion in enumerate(_of_length(completions, n, who, f"n = {n} at {place}")):
            _check_completion(completion, f"{who} returned, at {place}, completion {index},")


def _of_length(values: object, length: int, who: str, wanted: str) -> Sequence[object]:
    if not isinstance(values, Sequence):
        raise RolloutError(f"{who} returned {type(values).__name__} for {wanted}, where a list is needed.")
    if len(values) != length:
        raise RolloutError(f"{who} returned a list of {len(values)} for {wanted}.")
    return values


def _check_completion(completion: object, returned: str) -> None:
    if not isinstance(completion, Completion):
        raise RolloutError(f"{returned} a {type(completion).__name__} where a retrain.types.Completion is needed.")
    tokens = np.shape(completion.token_ids_T)
    if len(tokens) != 1:
        raise RolloutError(f"{returned} token ids of shape {tokens}, where one row is needed.")
    optional = (("entropies", completion.entropies_T), ("a sampled mask", completion.sampled_T))
    arrays = [("log-probs", completion.logprobs_T), *((what, array) for what, array in optional if array is not None)]
    for what, array in arrays:
        if np.shape(array) != tokens:
            raise RolloutError(f"{returned} {what} of shape {np.shape(array)} for {tokens[0]} tokens.")


def has_signal(group: Group) -> bool:
    """Whether the completions that count were scored differently from one another."""
    return len({score.value for score in group.scores_G if score.counts}) > 1
