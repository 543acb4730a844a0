"""Prompts of student and teacher: a template replaces the last user message of an example."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from retrain.config import schema
from retrain.modeling.tokens import PromptEncoder
from retrain.types import Example, IntArray

DIAGNOSTIC = (
    "{question}\n\n"
    "Do not solve this yet. Say in one or two sentences how you would go about it and what you are unsure of."
)
TEACHER = (
    "A student is going to be asked this:\n\n{question}\n\n"
    "Asked for a plan, the student said:\n\n{approach}\n\n"
    "Write what the student should read first. Correct its mistakes, add what is missing, and be brief."
)
WITH_TEACHING = "A teacher left you this note:\n\n{teaching}\n\nNow answer:\n\n{question}"
# The same prompt as in a run without teaching, so that both can be compared.
BASELINE = "{question}"

# Variables that each template must have.
TEMPLATE_VARIABLES = {
    "student_diagnostic_template": ("question",),
    "teacher_adaptive_template": ("question", "approach"),
    "student_with_teaching_template": ("question", "teaching"),
    "student_baseline_template": ("question",),
}

_VARIABLE = re.compile(r"\{(question|approach|teaching)\}")


@dataclass(frozen=True)
class Templates:
    """The four templates of a run."""

    diagnostic: str = DIAGNOSTIC
    teacher: str = TEACHER
    with_teaching: str = WITH_TEACHING
    baseline: str = BASELINE

    @classmethod
    def of(cls, section: schema.Teaching) -> Templates:
        """Templates of `[teaching]`, with built-in defaults."""
        return cls(
            section.student_diagnostic_template or DIAGNOSTIC,
            section.teacher_adaptive_template or TEACHER,
            section.student_with_teaching_template or WITH_TEACHING,
            section.student_baseline_template or BASELINE,
        )


@dataclass(frozen=True)
class Reader:
    """The tokenizer and context length of a model."""

    encoder: PromptEncoder
    context_length: int

    def read(self, example: Example, room: int) -> IntArray:
        """Token ids of a prompt, truncated on the left to leave `room` tokens for the answer."""
        return self.encoder.encode_once(example)[-max(1, self.context_length - room) :]

    def longest(self, examples: Iterable[Example], template: str) -> int:
        """Tokens of the longest question in a template before it is cut, other variables empty."""
        return self.encoder.longest_whole(ask(template, example, approach="", teaching="") for example in examples)


def ask(template: str, example: Example, **texts: str) -> Example:
    """The example with its question inserted into a template; other messages are kept."""
    if isinstance(example.prompt, str):
        return replace(example, prompt=_fill(template, example.prompt, texts))
    at = _question_at(example)
    messages = list(example.prompt)
    messages[at] = {**messages[at], "content": _fill(template, messages[at]["content"], texts)}
    return replace(example, prompt=tuple(messages))


def question_of(example: Example) -> str:
    """The value of `{question}`."""
    return example.prompt if isinstance(example.prompt, str) else example.prompt[_question_at(example)]["content"]


def _question_at(example: Example) -> int:
    """The index of the last user message, or of the last message."""
    assert not isinstance(example.prompt, str)
    asked = [at for at, message in enumerate(example.prompt) if message["role"] == "user"]
    return asked[-1] if asked else len(example.prompt) - 1


def _fill(template: str, question: str, texts: dict[str, str]) -> str:
    """Replace all variables in one pass; other braces are kept."""
    known = {"question": question, **texts}
    return _VARIABLE.sub(lambda match: known.get(match[1], match[0]), template)
