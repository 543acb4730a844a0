"""Adaptive teaching: the policy writes teaching and is rewarded for how much it helps a frozen student."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retrain.backends import Backend, FrozenModelProvider
from retrain.checks.preflight import known_context
from retrain.checks.vocabulary import check_template
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_context_length
from retrain.modeling.tokens import PromptEncoder, load_tokenizer
from retrain.rewards import BatchReward
from retrain.teaching.scorer import TeachingScore, TeachingScorer, teaching_reward
from retrain.teaching.student import Student
from retrain.teaching.templates import Reader, Templates
from retrain.tracking.console import Console
from retrain.types import Example

__all__ = [
    "Student",
    "TeachingScore",
    "TeachingScorer",
    "build_teaching_scorer",
    "check_context",
    "check_known_context",
    "limits_of",
    "teaching_reward",
]


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
    student_encoder = _student_encoder(config, encoder, console.print)
    frozen = backend.frozen(config, student_encoder.tokenizer, console.print, console.progress)
    reader = Reader(student_encoder, frozen.context_length)
    student = Student(frozen.engine, reader, Templates.of(section), section.max_probe_tokens, training.seed)
    teacher = Reader(encoder, backend.capabilities.context_length)
    return TeachingScorer(section, teacher, student, reward, console)


def _student_encoder(config: TrainConfig, encoder: PromptEncoder, log: Callable[[str], None]) -> PromptEncoder:
    name, where = config.teaching.student_model, "[teaching] student_model"
    if not name:
        return encoder
    tokenizer = load_tokenizer(name, where)
    check_template(config, tokenizer, where)
    return PromptEncoder(tokenizer, config.data.system_prompt, config.training.max_prompt_tokens, log)


def check_known_context(config: TrainConfig, encoder: PromptEncoder, examples: Sequence[Example]) -> list[str]:
    """As `check_context`, before the models are loaded, if their files have the lengths."""
    section, context = config.teaching, known_context(config)
    student = read_context_length(find_model(section.student_model)) if section.student_model else context
    if context is None or student is None:
        return []
    reader = Reader(_student_encoder(config, encoder, lambda line: None), student)
    return check_context(Reader(encoder, context), reader, Templates.of(section), limits_of(config), examples)


def limits_of(config: TrainConfig) -> tuple[int, int]:
    """Most tokens of the student's probe, and of other answers."""
    return config.teaching.max_probe_tokens, config.training.max_tokens


def check_context(
    teacher: Reader, student: Reader, templates: Templates, limits: tuple[int, int], examples: Sequence[Example]
) -> list[str]:
    """Raise for questions that do not fit a model's context; returns sentences on prompts that are cut.

    `limits` are tokens of the probe and of other answers.
    """
    (probe, max_tokens), cuts = limits, []
    for reader, who, template, filled, answer in (
        (student, "the baseline student", templates.baseline, 0, max_tokens),
        (student, "the probed student", templates.diagnostic, 0, probe),
        (teacher, "the teacher", templates.teacher, probe, max_tokens),
        (student, "the taught student", templates.with_teaching, max_tokens, max_tokens),
    ):
        prompt = reader.longest(examples, template) + filled
        cut = reader.encoder.max_prompt_tokens
        if 0 < cut < prompt:
            cuts.append(f"{who} reads up to {prompt} tokens, and max_prompt_tokens = {cut} keeps only the last ones")
            prompt = cut
        if prompt + answer > reader.context_length:
            raise ConfigError(
                f"[teaching] {who} reads up to {prompt} tokens and writes up to {answer}, which do not fit "
                f"its context of {reader.context_length}.  Try: a smaller [training] max_tokens or "
                "[teaching] max_probe_tokens, a shorter template, or shorter questions"
            )
    return cuts
