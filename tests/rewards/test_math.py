import json
import time
from pathlib import Path

import pytest
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.rewards import RewardPool, RewardSpec, TermSpec
from retrain.rewards.math import LONGEST_ANSWER, MathReward, equal_mathematics

MATH_ROWS = Path(__file__).parents[1] / "rows" / "math.jsonl"


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\sqrt{2}+1", r"1+\sqrt2"),
        (r"x^2-1", "(x-1)(x+1)"),
        ("7", r"\boxed{7}"),
        (r"\text{Evelyn}", "Evelyn"),
        ("2516_8", "2516_{8}"),
        (r"\{2, 1\}", r"\{1,2\}"),
        ("2, 1", r"\{1,2\}"),
    ],
)
def test_equal_mathematics_is_right(answer, reference):
    assert MathReward().score(f"Therefore $\\boxed{{{answer}}}$.", reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2516", "2516_8"),
        ("101_2", "101"),
        (r"\{1,2\}", "(1,2)"),
        ("[1,2]", r"\left\{ 1, 2 \right\}"),
        ("3", "-3"),
        ("- 3", "3"),
        ("0.4", r"\frac{1}{2}"),
        ("Evelyn", r"\text{Alice}"),
        ("1" * (LONGEST_ANSWER + 1), "1"),
        ("", "1"),
        (r"\frac{", "1"),
    ],
)
def test_other_mathematics_is_wrong(answer, reference):
    assert MathReward().score(f"Therefore $\\boxed{{{answer}}}$.", reference) == 0.0


def test_only_the_last_box_counts():
    assert MathReward().score(r"\boxed{8} no, \boxed{7}", "7") == 1.0
    assert MathReward().score(r"\boxed{7} no, \boxed{8}", "7") == 0.0


HOSTILE = [
    "100000000!",
    "9^{9^{9^{9}}}",
    "2^{1000000007}",
    "10^{10^{10}}",
    r"\binom{10^8}{5\cdot10^7}",
    "((((((9^9)^9)^9)^9)^9)^9)",
    "9" * 999 + "!",
    "5" + "!" * 500,
    "(" * 400 + "1" + ")" * 400,
    "2^" * 450 + "2",
    r"\sqrt{" * 140 + "2" + "}" * 140,
    r"\sin(" * 150 + "1" + ")" * 150,
    "1e99999999",
    "(1e5000)^{1000}",
    "+".join(["1"] * 480),
    "1/" * 480 + "1",
    ",".join(rf"\sqrt{{{n}}}" for n in range(100)),
    "(x+y+z)^{50000}",
    "x^{x^{x^{x^{x}}}}",
    "e^{e^{e^{e^{e}}}}",
    r"\tan(10^{300})",
    r"\sum_{n=1}^{10^9} n",
    r"\int_0^1 x^{10^9} dx",
    "1<" * 300 + "2",
    r"1\pm" * 250 + "1",
    "x_{" * 300 + "1" + "}" * 300,
    "5 " + "cm " * 300,
]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:20])
@pytest.mark.parametrize("reference", ["3", "x+1", r"(1,\sqrt{2})", "x = 5", r"5\text{ m}"])
def test_an_answer_that_would_explode_is_wrong_at_once(answer, reference):
    equal_mathematics("1", "2")
    began = time.process_time()
    assert not equal_mathematics(answer, reference)
    assert not equal_mathematics(reference, answer)
    assert time.process_time() - began < 2.0


def test_answers_that_would_explode_cost_no_worker_and_no_other_item():
    items = [(r"\boxed{1}", "1"), (r"\boxed{100000000!}", "3"), (r"\boxed{\frac{2}{4}}", "0.5"), (r"\boxed{3}", "1")]
    with RewardPool(RewardSpec((TermSpec("math"),)), timeout_s=5.0, workers=1) as pool:
        scores = pool.score(items)
    assert [score.outcome for score in scores] == ["right", "wrong", "right", "wrong"]


def test_what_is_not_read_here_is_asked_of_math_verify():
    assert equal_mathematics(r"\sum_{k=1}^{4} k", "10")
    assert equal_mathematics(r"\int_0^1 2x \, dx", "1")
    assert not equal_mathematics(r"\sum_{k=1}^{4} k", "11")


def test_solutions_of_the_math_set_are_right_and_a_neighbours_answer_is_wrong():
    rows = [json.loads(line) for line in MATH_ROWS.read_text(encoding="utf-8").splitlines()]
    sample = [row for row in rows if row["answer"].strip()]
    own = [(row["solution"], row["answer"]) for row in sample]
    # Wrapped answers take the symbolic way where the text alone would do, as a model's spelling mostly does.
    spaced = [(f"\\boxed{{0+{row['answer']}}}", row["answer"]) for row in sample if row["answer"].isdigit()]
    other = [(row["solution"], f"{int(row['answer']) + 1}") for row in sample if row["answer"].isdigit()]
    with RewardPool(RewardSpec((TermSpec("math"),)), workers=2) as pool:
        assert {score.outcome for score in pool.score(own)} == {"right"}
        assert {score.outcome for score in pool.score(spaced)} == {"right"}
        assert {score.outcome for score in pool.score(other)} == {"wrong"}


TOKENS = r"""0 1 2 5 8 x y e i R _ ^ { } ( ) [ ] | , ; : = < > + - * / ! % $ \ \{ \} \$ \% ½ ² √ π ∞ ≤ ٣ 1,000 10^{400}
    2^{1000} 0/0 5! _{8} \frac \sqrt \pi \infty \le \ne \in \cup \approx \circ \pm \cdot \times \binom \log \sin \dots
    \mod \text{cm} \text{and} \overline{3} \left( \right)"""
TEXTS = st.lists(st.sampled_from(TOKENS.split()), min_size=1, max_size=9).map("".join)


@settings(deadline=None, max_examples=examples(4000))
@given(TEXTS, TEXTS)
def test_no_answer_and_no_reference_raises(answer: str, reference: str) -> None:
    assert MathReward().score(rf"\boxed{{{answer}}}", reference) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("x_", "5", 0.0),
        ("5", "x_", 0.0),
        (r"2^{2000} \approx 10^{602}", "5", 0.0),
        (r"10^{400} \approx 10^{400}", "10^{400}", 1.0),
        (r"\frac{1}{3} \approx 0.33", r"\frac13", 1.0),
    ],
)
def test_what_ends_too_early_or_is_too_large_is_read(answer: str, reference: str, value: float) -> None:
    assert MathReward().score(rf"\boxed{{{answer}}}", reference) == value
