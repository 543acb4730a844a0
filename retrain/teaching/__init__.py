"""Adaptive teaching: the policy writes teaching, and is rewarded by what a frozen student makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.backends import Backend, LendsFrozen
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.tokens import PromptEncoder, load_tokenizer
from retrain.rewards import BatchReward
from retrain.teaching.classroom import Classroom, TeachingScore, teaching_reward
from retrain.teaching.student import Student
from retrain.teaching.templates import Reader, Templates
from retrain.tracking.console import Console
from retrain.types import Example

__all__ = ["Classroom", "Student", "TeachingScore", "build_classroom", "check_room", "teaching_reward"]


def build_classroom(
    config: TrainConfig, backend: Backend, encoder: PromptEncoder, reward: BatchReward, console: Console
) -> Classroom:
    """Put the policy and a student together. A student that is another model reads with its own tokenizer."""
    if not isinstance(backend, LendsFrozen):
        raise ConfigError(
            f"[teaching] enabled needs a backend that lends a frozen model, and {config.backend.backend} does not "
            "(it has no method `frozen`).  Try: enabled = false"
        )
    section, training = config.teaching, config.training
    own = encoder
    if section.student_model:
        tokenizer = load_tokenizer(section.student_model, "[teaching] student_model")
        own = PromptEncoder(tokenizer, config.data.system_prompt, training.max_prompt_tokens, console.say)
    lent = backend.frozen(config, own.tokenizer, console.say, console.progress)
    reader = Reader(own, lent.context_length)
    student = Student(lent.engine, reader, Templates.of(section), section.max_probe_tokens, training.seed)
    teacher = Reader(encoder, backend.capabilities.context_length)
    return Classroom(section, teacher, student, reward, console)


def check_room(classroom: Classroom, examples: Sequence[Example], max_tokens: int) -> None:
    """Refuse questions that leave a model no room, before anything is sampled."""
    student, teacher, probe = classroom.student, classroom.teacher, classroom.section.max_probe_tokens
    templates = student.templates
    for reader, who, template, filled, answer in (
        (student.reader, "the student alone", templates.baseline, 0, max_tokens),
        (student.reader, "the probed student", templates.diagnostic, 0, probe),
        (teacher, "the teacher", templates.teacher, probe, max_tokens),
        (student.reader, "the taught student", templates.with_teaching, max_tokens, max_tokens),
    ):
        prompt = reader.longest(examples, template) + filled
        cut = reader.encoder.max_prompt_tokens
        prompt = min(prompt, cut) if cut else prompt
        if prompt + answer > reader.context_length:
            raise ConfigError(
                f"[teaching] {who} is shown up to {prompt} tokens and writes up to {answer}, which do not fit "
                f"its context of {reader.context_length}.  Try: a smaller [training] max_tokens or "
                "[teaching] max_probe_tokens, or a shorter template"
            )
