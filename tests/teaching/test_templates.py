"""Templates: what is put in where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import load_config
from retrain.config.schema import Teaching
from retrain.errors import ConfigError
from retrain.teaching.templates import Templates, ask, question_of
from retrain.types import Example


def test_empty_templates_are_the_built_in_ones() -> None:
    assert Templates.of(Teaching()) == Templates()
    own = Templates.of(Teaching(student_baseline_template="Q: {question}"))
    assert (own.baseline, own.teacher) == ("Q: {question}", Templates().teacher)


def test_the_built_in_templates_obey_the_rule_for_templates() -> None:
    built_in = Templates()
    load_config(
        None,
        {
            "algorithm.advantage_mode": "grpo",
            "teaching.enabled": True,
            "teaching.student_diagnostic_template": built_in.diagnostic,
            "teaching.teacher_adaptive_template": built_in.teacher,
            "teaching.student_with_teaching_template": built_in.with_teaching,
            "teaching.student_baseline_template": built_in.baseline,
        },
    )


@given(st.text(), st.text())
def test_what_is_put_in_is_text_whatever_braces_it_holds(question: str, teaching: str) -> None:
    asked = ask("<{question}|{teaching}>", Example(question, ""), teaching=teaching)
    assert asked.prompt == f"<{question}|{teaching}>"


def test_braces_that_name_nothing_stay() -> None:
    asked = ask(r"Put \boxed{} around it, {}: {question} \frac{a}{b} x{teaching}", Example("1+1", "2"))
    assert asked.prompt == r"Put \boxed{} around it, {}: 1+1 \frac{a}{b} x{teaching}"


def test_messages_around_the_question_stay() -> None:
    chat = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    )
    example = Example(chat, "4")
    asked = ask("{teaching} {question}", example, teaching="count")
    assert asked.prompt == (*chat[:3], {"role": "user", "content": "count 2+2?"})
    assert question_of(example) == "2+2?" and asked.reference == "4"


def test_without_a_user_the_last_message_is_the_question() -> None:
    example = Example(({"role": "system", "content": "say hello"},), "")
    assert ask("please {question}", example).prompt == ({"role": "system", "content": "please say hello"},)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("student_diagnostic_template", "plan?", "lacks {question}."),
        ("teacher_adaptive_template", "{question}", "lacks {approach}."),
        ("teacher_adaptive_template", "?", "lacks {question} and {approach}."),
        ("student_with_teaching_template", "{question}", "lacks {teaching}."),
        ("student_baseline_template", "{question} {teaching}", "has the unknown variable {teaching}."),
        ("teacher_adaptive_template", "{question} {approach} {probe}", "has the unknown variable {probe}."),
    ],
)
def test_a_template_with_the_wrong_variables_is_rejected(key: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"algorithm.advantage_mode": "grpo", "teaching.enabled": True, f"teaching.{key}": text})
    assert f"[teaching] {key} {expected}" in str(raised.value)


def test_latex_in_a_template_is_no_variable() -> None:
    text = r"Put the answer in \boxed{answer}, such as \frac{a}{b}. {question}"
    load_config(
        None, {"algorithm.advantage_mode": "grpo", "teaching.enabled": True, "teaching.student_baseline_template": text}
    )
