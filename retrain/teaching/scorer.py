"""Samples teaching from the policy, and scores it by the student's answers with and without it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from retrain.config import schema
from retrain.inference_engine import InferenceEngine
from retrain.rewards import BatchReward, Item
from retrain.rollout import DeliverGroup, Failures, Rollouts, check_completions
from retrain.teaching.student import Baseline, Student
from retrain.teaching.templates import Reader, ask, question_of
from retrain.tracking.console import Console
from retrain.types import Completion, Example, Group, IntArray, Metric, Sampling, Score, StepMetrics

# Teaching of this length gets 1/e of the bonus.
BONUS_TOKENS = 100.0


@dataclass(frozen=True, kw_only=True)
class TeachingScore(Score):
    """The score of teaching, and the student's scores without and with it."""

    baseline: Score
    taught: Score


def teaching_reward(baseline: Score, taught: Score, tokens: int, section: schema.Teaching) -> float:
    """The change in the student's score, penalized if negative, plus a bonus for short teaching if it is correct."""
    change = taught.value - baseline.value
    reward = change if change >= 0 else section.degradation_penalty_multiplier * change
    if taught.outcome == "right":
        reward += section.efficiency_weight * math.exp(-tokens / BONUS_TOKENS)
    return reward


class TeachingScorer:
    """Samples teaching and scores the student's answers. Teaching counts as correct when the student's answer is."""

    def __init__(
        self, section: schema.Teaching, teacher: Reader, student: Student, reward: BatchReward, console: Console
    ) -> None:
        self.section = section
        self.teacher = teacher
        self.student = student
        self.reward = reward
        self.progress = console.progress
        self.failures = Failures("Scoring", "answers of the student", console.print)

    def sample_and_score(
        self,
        engine: InferenceEngine,
        examples: Sequence[Example],
        sampling: Sampling,
        deliver: DeliverGroup | None = None,
    ) -> Rollouts:
        """One group of teaching per example, in order. All are scored together, so none is delivered early."""
        started = time.perf_counter()
        baselines = self.student.baseline(examples, sampling)
        prompts = [self._prompt(*each, sampling) for each in zip(examples, baselines, strict=True)]
        teaching_PG = engine.generate(prompts, sampling)
        check_completions(engine, teaching_PG, len(prompts), sampling.n)
        lessons = [(example, one) for example, group in zip(examples, teaching_PG, strict=True) for one in group]
        answers = self.student.answer([(example, one.text) for example, one in lessons], sampling)
        sampled = time.perf_counter()
        self.progress("scoring", 0, len(answers))
        scores = self._score(examples, baselines, answers, sampling.n)
        groups = []
        for at, (example, prompt, group) in enumerate(zip(examples, prompts, teaching_PG, strict=True)):
            part = slice(at * sampling.n, (at + 1) * sampling.n)
            baseline = baselines[at]
            values = [self._value(baseline, *each) for each in zip(group, scores[part], strict=True)]
            teaching = [
                _transcribe(example, baseline, *each) for each in zip(group, answers[part], values, strict=True)
            ]
            groups.append(Group(example, prompt, tuple(teaching), tuple(values)))
        return Rollouts(groups, sampled - started, time.perf_counter() - sampled, student_metrics(groups))

    def group_metrics(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """Metrics of the student."""
        return student_metrics(groups)

    def reward_metrics(self) -> Mapping[str, Metric]:
        """Metrics of scoring."""
        return self.reward.metrics()

    def close(self) -> None:
        """Shut the student's engine down."""
        self.student.engine.shutdown()

    def _prompt(self, example: Example, baseline: Baseline, sampling: Sampling) -> IntArray:
        asked = ask(self.student.templates.teacher, example, approach=baseline.probe)
        return self.teacher.read(asked, sampling.max_tokens)

    def _score(
        self, examples: Sequence[Example], baselines: Sequence[Baseline], answers: list[str], n: int
    ) -> list[Score]:
        """Score the answers with teaching, and baseline answers that have no score yet."""
        pairs = zip(baselines, examples, strict=True)
        new = {id(pair[0]): pair for pair in pairs if pair[0].score is None or not pair[0].score.counts}
        items = [_item(example, baseline.answer) for baseline, example in new.values()]
        items += [_item(examples[at // n], answer) for at, answer in enumerate(answers)]
        scores = self.reward.score(items)
        self.failures.check(scores)
        for (baseline, _), score in zip(new.values(), scores, strict=False):
            baseline.score = score
        return scores[len(new) :]

    def _value(self, baseline: Baseline, teaching: Completion, taught: Score) -> Score:
        assert baseline.score is not None
        for score, when in ((baseline.score, "without teaching"), (taught, "with teaching")):
            if not score.counts:
                return replace(score, detail=f"the student's answer {when}: {score.detail}")
        value = teaching_reward(baseline.score, taught, len(teaching.token_ids_T), self.section)
        return TeachingScore(value, taught.outcome, baseline=baseline.score, taught=taught)


def student_metrics(groups: Sequence[Group]) -> StepMetrics:
    """Accuracy and improvement of the students of these groups."""
    pairs = [
        (score, completion)
        for group in groups
        for score, completion in zip(group.scores_G, group.completions_G, strict=True)
        if isinstance(score, TeachingScore)
    ]
    scores = [score for score, _ in pairs]
    return {
        "student_accuracy": _mean([score.taught.outcome == "right" for score in scores]),
        "baseline_accuracy": _mean([score.baseline.outcome == "right" for score in scores]),
        "improvement_rate": _mean([score.taught.value > score.baseline.value for score in scores]),
        "degradation_rate": _mean([score.taught.value < score.baseline.value for score in scores]),
        "teaching_length": _mean([len(completion.token_ids_T) for _, completion in pairs]),
    }


def _transcribe(example: Example, baseline: Baseline, teaching: Completion, answer: str, value: Score) -> Completion:
    """The teaching with its transcript, for the log."""
    scores: dict[str, dict[str, float]] = {"alone": {}, "taught": {}}
    if isinstance(value, TeachingScore):
        scores = {"alone": {"score": value.baseline.value}, "taught": {"score": value.taught.value}}
    transcript = (
        {"role": "question", "content": question_of(example)},
        {"role": "student alone", "content": baseline.answer, **scores["alone"]},
        {"role": "student probed", "content": baseline.probe},
        {"role": "teacher", "content": teaching.text},
        {"role": "student taught", "content": answer, **scores["taught"]},
    )
    return replace(teaching, transcript=transcript)


def _item(example: Example, answer: str) -> Item:
    return Item(answer, example.reference, example.prompt, example.meta)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
