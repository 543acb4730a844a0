import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.rewards.match import MatchReward, answer_of, equal_as_text, last_boxed, normalize

MATH_ROWS = Path(__file__).parents[1] / "rows" / "math.jsonl"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        ("no box here", ""),
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{\{1, 2)}", r"\{1, 2)"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 9$", "9"),
        (r"\boxed{x=\boxed{5}}", "5"),
        (r"\boxed{3} and then it was cut: \boxed{\frac{1}{", "3"),
        (r"\boxed{", ""),
        (r"\boxed", ""),
        (r"{ \boxed{a", ""),
        (r"} } \boxed{b} }", "b"),
        (r"\boxed{}", ""),
        ("\\boxed{\n  12\n}", "12"),
    ],
)
def test_the_last_box_that_closes_is_the_answer(text, answer):
    assert last_boxed(text) == answer


def test_a_response_that_repeats_an_open_box_is_read_in_one_pass():
    assert last_boxed("\\boxed{" * 200_000) == ""
    assert last_boxed("\\boxed{" * 200_000 + "1}") == "1"


def balanced_text() -> st.SearchStrategy[str]:
    plain = st.text(alphabet="abc123+-^_ ", max_size=5)
    return st.recursive(
        plain, lambda inner: st.builds(lambda a, b, c: f"{a}{{{b}}}{c}", inner, inner, inner), max_leaves=8
    )


@given(balanced_text(), st.text(alphabet="xyz {}", max_size=20))
def test_whatever_is_balanced_comes_out_of_its_box(content, before):
    assert last_boxed(f"{before} \\boxed{{{content}}} and so on.") == content.strip()


@given(st.text(alphabet="\\boxed{} 12fb", max_size=60))
def test_no_text_breaks_the_extraction(text):
    assert last_boxed(text) in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/2", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac 1{72}", r"\frac{1}{72}"),
        (r"\frac{-1}{2}", r"-\frac12"),
        (r"\left( 1 , 2 \right)", "(1,2)"),
        (r"\bigl(1,2\bigr)", "(1,2)"),
        ("$18$", "18"),
        (r"\$18.90", "18.9"),
        ("18.", "18"),
        ("1,000", "1000"),
        (r"33{,}800{,}000", "33800000"),
        (r"5,\!040", "5040"),
        (".5", "0.5"),
        ("27.0", "27"),
        ("+3", "3"),
        ("\u22123", "-3"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"64\%", "64"),
        (r"4 \text{ feet}", "4"),
        (r"2400 \mbox{ cm}^2", "2400"),
        (r"1.85\ \text{USD}", "1.85"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{even}", "Even"),
        ("x = 5", "5"),
        (r"x \in [1,2]", "[1,2]"),
        (r"x \le 2", r"x\leq2"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("{7}", "7"),
        ("x^{2}", "x^2"),
        (r"12,\!345", "12345"),
        (r"12,\! 345", "12345"),
        ("025", "25"),
        (r"\frac \pi4", r"\frac{\pi}{4}"),
        ("½", r"\frac12"),
        ("18 dollars", "18"),
        ("€5", "5"),
        ("5 €", "5"),
        (r"\euro 5", "5€"),
        ("£1,234.50", "1234.5"),
        (r"\pounds 5", "5"),
        ("¥500", "500"),
        ("3:00 PM", r"3:00\text{ PM}"),
        ("3:00 p.m.", r"3:00\text{ PM}"),
        ("(C)", r"\text{C}"),
        ("(2516)_8", "2516_{8}"),
    ],
)
def test_spellings_of_one_answer_are_equal(one, other):
    assert normalize(one) == normalize(other)
    assert equal_as_text(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (".6", "6"),
        ("-3", "3"),
        ("A", "a"),
        ("(1,2)", r"\{1,2\}"),
        ("101_2", "101"),
        (r"8\!:\!34 \text{ p.m.}", r"8\!:\!34 \text{ a.m.}"),
        ("12,9", "129"),
        ("0.5", r"\frac12"),
        ("10", "1"),
        (r"\leftarrow", "arrow"),
        ("x=1, y=2", "1, y=2"),
        ("€5", r"\$5"),
        ("£5", "5 euros"),
        (r"45^\circ, 135^\circ", "45135"),
        ("1, 234", "1234"),
        ("5 cm", "5 m"),
        (r"5\text{ cm}", r"5\text{ cm}^2"),
        (r"5\%", r"\$5"),
        ("x=5", "y=5"),
        ("1 1/2", "11/2"),
        ("2 3", "23"),
    ],
)
def test_different_answers_stay_different(one, other):
    assert not equal_as_text(one, other)


@given(st.text(max_size=40))
def test_normalizing_never_fails_and_an_answer_equals_itself(text):
    assert equal_as_text(text, text) == bool(normalize(text))


def test_a_response_without_a_box_is_wrong_even_when_the_reference_is_empty():
    assert MatchReward().score("the answer is 5", "5") == 0.0
    assert MatchReward().score("nothing", "") == 0.0
    assert MatchReward().score(r"\boxed{}", "") == 0.0


def test_a_reference_may_be_a_whole_solution():
    assert answer_of(r"Because of symmetry, \boxed{7}.") == "7"
    assert MatchReward().score(r"I say \boxed{7}", r"Because of symmetry, \boxed{7}.") == 1.0


def test_every_solution_of_the_math_set_yields_its_answer_and_matches_itself():
    rows = [json.loads(line) for line in MATH_ROWS.read_text(encoding="utf-8").splitlines()]
    assert [last_boxed(row["solution"]) for row in rows] == [row["answer"].strip() for row in rows]
    scores = [MatchReward().score(row["solution"], row["answer"]) for row in rows]
    assert [row["id"] for row, score in zip(rows, scores, strict=True) if score == 0.0 and row["answer"].strip()] == []


@pytest.mark.parametrize(
    ("answer", "reference"), [("25", "025"), (r"\textbf{(113)}", "113"), ("72", "2*36=72\n#### 72")]
)
def test_padded_and_dressed_up_numbers_match_and_so_does_a_raw_gsm8k_reference(answer, reference):
    assert MatchReward().score(f"\\boxed{{{answer}}}", reference) == 1.0


def test_a_row_end_with_a_blank_after_it_is_not_spacing():
    column = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    assert equal_as_text(column, r"\begin{pmatrix}1\\2\end{pmatrix}")
    assert not equal_as_text(column, r"\begin{pmatrix} 1 2 \end{pmatrix}")


def test_a_box_in_the_thoughts_counts_unless_configured_otherwise():
    thought = r"<think>It must be \boxed{5}.</think>"
    for response, strict in [
        (f"{thought} The answer is five.", 0.0),
        (rf"{thought} The answer is \boxed{{5}}.", 1.0),
        (thought.removeprefix("<think>"), 0.0),  # templates may open the thoughts in the prompt
        (r"<think>It must be \boxed{5}", 0.0),  # cut off
        (r"\boxed{5}", 1.0),
    ]:
        assert MatchReward().score(response, "5") == 1.0
        assert MatchReward(think_boxes=False).score(response, "5") == strict
    assert MatchReward().score(rf"{thought} No, \boxed{{6}}.", "5") == 0.0


@pytest.mark.parametrize(("letter", "full"), [("C", "(C) 12"), (r"\text{C}", r"\textbf{(C)}\ 12"), ("(C)", "C. 12")])
def test_a_choice_may_have_its_text_on_either_side(letter: str, full: str) -> None:
    assert equal_as_text(letter, full) and equal_as_text(full, letter)
    assert not equal_as_text("D", full) and not equal_as_text(full, "D")
    assert not equal_as_text("12", full)
