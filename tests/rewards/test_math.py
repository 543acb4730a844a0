import json
import random
from pathlib import Path

import pytest

from retrain.rewards import RewardPool, RewardSpec, TermSpec
from retrain.rewards.math import LONGEST_ANSWER, MathReward

MATH_ROWS = Path(__file__).parents[3] / "shared" / "data" / "math_train.jsonl"


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


def test_an_answer_that_takes_for_ever_to_compare_is_a_timeout_and_the_others_are_scored():
    items = [(r"\boxed{1}", "1"), (r"\boxed{100000000!}", "3"), (r"\boxed{\frac{2}{4}}", "0.5"), (r"\boxed{3}", "1")]
    with RewardPool(RewardSpec((TermSpec("math"),)), timeout_s=2.0, workers=1) as pool:
        scores = pool.score(items)
    assert [score.outcome for score in scores] == ["right", "timeout", "right", "wrong"]


@pytest.mark.skipif(not MATH_ROWS.exists(), reason="the MATH rows are not on this machine")
def test_solutions_of_the_math_set_are_right_and_a_neighbours_answer_is_wrong():
    rows = [json.loads(line) for line in MATH_ROWS.read_text(encoding="utf-8").splitlines()]
    sample = [row for row in random.Random(0).sample(rows, 300) if row["answer"].strip()]
    own = [(row["solution"], row["answer"]) for row in sample]
    # Wrapped answers take the symbolic way where the text alone would do, as a model's spelling mostly does.
    spaced = [(f"\\boxed{{0+{row['answer']}}}", row["answer"]) for row in sample if row["answer"].isdigit()]
    other = [(row["solution"], f"{int(row['answer']) + 1}") for row in sample if row["answer"].isdigit()]
    with RewardPool(RewardSpec((TermSpec("math"),)), workers=2) as pool:
        assert {score.outcome for score in pool.score(own)} == {"right"}
        assert {score.outcome for score in pool.score(spaced)} == {"right"}
        assert {score.outcome for score in pool.score(other)} == {"wrong"}
