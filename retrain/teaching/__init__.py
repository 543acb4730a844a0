"""Adaptive teaching: the policy writes teaching and is rewarded for how much it helps a frozen student."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.backends import Backend, FrozenModelProvider
from retrain.checks.vocabulary import check_template
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.tokens import PromptEncoder, load_tokenizer
from retrain.rewards import BatchReward
from retrain.teaching.scorer import TeachingScore, TeachingScorer, teaching_reward
from retrain.teaching.student import Student
from retrain.teaching.templates import Reader, Templates
from retrain.tracking.console import Console
from retrain.types import Example

__all__ = ["Student", "TeachingScore", "TeachingScorer", "build_teaching_scorer", "check_context", "teaching_reward"]


def build_teaching_scorer(
    config: TrainConfig, backend: Backend, encoder: PromptEncoder, reward: BatchReward, console: Console
) -> TeachingScorer:
    """Build the scorer of a policy and a student; a student of another model has its own tokenizer."""
    if not isinstance(backend, FrozenModelProvider):
        raise ConfigError(
            f"[teaching] enabled needs a backend that provides a frozen model, and {config.backend.backend} does not "
            "(it has no method `frozen`).  Try: enabled = false"
        )
    section, training = config.teaching, config.training
    student_encoder = encoder
    if section.student_model:
        tokenizer = load_tokenizer(section.student_model, "[teaching] student_model")
        check_template(config, tokenizer, "[teaching] student_model")
        student_encoder = PromptEncoder(tokenizer, config.data.system_prompt, training.max_prompt_tokens, console.print)
    frozen = backend.frozen(config, student_encoder.tokenizer, console.print, console.progress)
    reader = Reader(student_encoder, frozen.context_length)
    student = Student(frozen.engine, reader, Templates.of(section), section.max_probe_tokens, training.seed)
    teacher = Reader(encoder, backend.capabilities.context_length)
    return TeachingScorer(section, teacher, student, reward, console)


def check_context(scorer: TeachingScorer, examples: Sequence[Example], max_tokens: int) -> None:
    """Raise for questions that do not fit a model's context, before anything is sampled."""
    student, teacher, probe = scorer.student, scorer.teacher, scorer.section.max_probe_tokens
    templates = student.templates
    for reader, who, template, filled, answer in (
        (student.reader, "the baseline student", templates.baseline, 0, max_tokens),
        (student.reader, "the probed student", templates.diagnostic, 0, probe),
        (teacher, "the teacher", templates.teacher, probe, max_tokens),
        (student.reader, "the taught student", templates.with_teaching, max_tokens, max_tokens),
    ):
        prompt = reader.longest(examples, template) + filled
        cut = reader.encoder.max_prompt_tokens
        prompt = min(prompt, cut) if cut else prompt
        if prompt + answer > reader.context_length:
            raise ConfigError(
                f"[teaching] {who} reads up to {prompt} tokens and writes up to {answer}, which do not fit "
                f"its context of {reader.context_length}.  Try: a smaller [training] max_tokens or "
                "[teaching] max_probe_tokens, or a shorter template"
            )
