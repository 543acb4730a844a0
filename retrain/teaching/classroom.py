"""Samples teaching from the policy, and scores it by how the student does with it and without."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from retrain.inference_engine import InferenceEngine
from retrain.rewards import BatchReward, Item
from retrain.rollout import Failures, Rollouts, check_completions
from retrain.teaching.student import Alone, Student
from retrain.teaching.templates import Reader, ask, question_of
from retrain.tracking.console import Console
from retrain.types import Completion, Example, Group, IntArray, Metric, Sampling, Score, StepMetrics

if TYPE_CHECKING:
    from retrain.config import schema

# Teaching of so many tokens earns 1/e of the whole bonus.
BONUS_TOKENS = 100.0


@dataclass(frozen=True, kw_only=True)
class TeachingScore(Score):
    """What a piece of teaching is worth, and the two scores of the student that this follows from."""

    alone: Score
    taught: Score


def teaching_reward(alone: Score, taught: Score, tokens: int, section: schema.Teaching) -> float:
    """Δ, or a multiple of it where it is negative; where the student ends right, a bonus for brief teaching too."""
    change = taught.value - alone.value
    reward = change if change >= 0 else section.degradation_penalty_multiplier * change
    if taught.outcome == "right":
        reward += section.efficiency_weight * math.exp(-tokens / BONUS_TOKENS)
    return reward


class Classroom:
    """Samples and scores like a `Scorer`, but what is sampled is teaching and what is scored are the student's answers.

    A piece of teaching counts as right when the student is right with it.
    """

    def __init__(
        self, section: schema.Teaching, teacher: Reader, student: Student, reward: BatchReward, console: Console
    ) -> None:
        self.section = section
        self.teacher = teacher
        self.student = student
        self.reward = reward
        self.progress = console.progress
        self.failures = Failures("Scoring", "answers of the student", console.say)

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One group of teaching an example, in order."""
        started = time.perf_counter()
        met = self.student.meet(examples, sampling)
        prompts = [self._prompt(*each, sampling) for each in zip(examples, met, strict=True)]
        teaching_PG = engine.generate(prompts, sampling)
        check_completions(engine, teaching_PG, len(prompts), sampling.n)
        lessons = [(example, one) for example, own in zip(examples, teaching_PG, strict=True) for one in own]
        answers = self.student.answer([(example, one.text) for example, one in lessons], sampling)
        sampled = time.perf_counter()
        self.progress("scoring", 0, len(answers))
        scores = self._score(examples, met, answers, sampling.n)
        groups = []
        for at, (example, prompt, own) in enumerate(zip(examples, prompts, teaching_PG, strict=True)):
            part = slice(at * sampling.n, (at + 1) * sampling.n)
            alone = met[at]
            worth = [self._worth(alone, *each) for each in zip(own, scores[part], strict=True)]
            told = [_tell(example, alone, *each) for each in zip(own, answers[part], worth, strict=True)]
            groups.append(Group(example, prompt, tuple(told), tuple(worth)))
        return Rollouts(groups, sampled - started, time.perf_counter() - sampled, describe_students(groups))

    def describe(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """How the student did in a step, and what scoring cost."""
        return {**self.reward.metrics(), **describe_students(groups)}

    def close(self) -> None:
        """Let the student's engine free what it holds."""
        self.student.engine.shutdown()

    def _prompt(self, example: Example, alone: Alone, sampling: Sampling) -> IntArray:
        asked = ask(self.student.templates.teacher, example, approach=alone.probe)
        return self.teacher.read(asked, sampling.max_tokens)

    def _score(self, examples: Sequence[Example], met: Sequence[Alone], answers: list[str], n: int) -> list[Score]:
        """Scores of the answers with teaching; what was answered alone is scored with them, if it was not before."""
        pairs = zip(met, examples, strict=True)
        new = {id(pair[0]): pair for pair in pairs if pair[0].score is None or not pair[0].score.counts}
        items = [_item(example, alone.answer) for alone, example in new.values()]
        items += [_item(examples[at // n], answer) for at, answer in enumerate(answers)]
        scores = self.reward.score(items)
        self.failures.mind(scores)
        for (alone, _), score in zip(new.values(), scores, strict=False):
            alone.score = score
        return scores[len(new) :]

    def _worth(self, alone: Alone, teaching: Completion, taught: Score) -> Score:
        assert alone.score is not None
        for score, when in ((alone.score, "alone"), (taught, "with teaching")):
            if not score.counts:
                return replace(score, detail=f"the student's answer {when}: {score.detail}")
        value = teaching_reward(alone.score, taught, len(teaching.token_ids_T), self.section)
        return TeachingScore(value, taught.outcome, alone=alone.score, taught=taught)


def describe_students(groups: Sequence[Group]) -> StepMetrics:
    """How the students of these groups did, taught and alone."""
    pairs = [
        (score, completion)
        for group in groups
        for score, completion in zip(group.scores_G, group.completions_G, strict=True)
        if isinstance(score, TeachingScore)
    ]
    scores = [score for score, _ in pairs]
    return {
        "student_accuracy": _mean([score.taught.outcome == "right" for score in scores]),
        "baseline_accuracy": _mean([score.alone.outcome == "right" for score in scores]),
        "improvement_rate": _mean([score.taught.value > score.alone.value for score in scores]),
        "degradation_rate": _mean([score.taught.value < score.alone.value for score in scores]),
        "teaching_length": _mean([len(completion.token_ids_T) for _, completion in pairs]),
    }


def _tell(example: Example, alone: Alone, teaching: Completion, answer: str, worth: Score) -> Completion:
    """The teaching with all that was said around it, for the log."""
    scores: dict[str, dict[str, Any]] = {"alone": {}, "taught": {}}
    if isinstance(worth, TeachingScore):
        scores = {"alone": {"score": worth.alone.value}, "taught": {"score": worth.taught.value}}
    said = (
        {"role": "question", "content": question_of(example)},
        {"role": "student alone", "content": alone.answer, **scores["alone"]},
        {"role": "student probed", "content": alone.probe},
        {"role": "teacher", "content": teaching.text},
        {"role": "student taught", "content": answer, **scores["taught"]},
    )
    return replace(teaching, transcript=said)


def _item(example: Example, answer: str) -> Item:
    return Item(answer, example.reference, example.prompt, example.meta)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
