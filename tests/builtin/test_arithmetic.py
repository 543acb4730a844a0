"""The arithmetic task: its range, its answers and its held-out split."""

import random
from collections import Counter
from itertools import accumulate

import pytest

from retrain.builtin import resolve_model
from retrain.data.arithmetic import Problem, draw_problem, draw_split, is_held_out, read_terms
from retrain.errors import ConfigError


def draw_many(count: int, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    return [draw_problem(rng) for _ in range(count)]


def test_a_question_reads_back_as_its_signed_terms() -> None:
    assert read_terms("13-7+1-5=?") == [13, -7, 1, -5]


def test_every_answer_is_the_sum_of_the_terms() -> None:
    for problem in draw_many(2000):
        assert problem.answer == str(sum(read_terms(problem.question)))


def test_partial_results_stay_between_0_and_20() -> None:
    for problem in draw_many(2000):
        assert all(0 <= total <= 20 for total in accumulate(read_terms(problem.question)))


def test_problems_have_three_to_five_operands_and_all_lengths_occur() -> None:
    lengths = Counter(len(read_terms(problem.question)) for problem in draw_many(2000))
    assert set(lengths) == {3, 4, 5}
    assert min(lengths.values()) > 200


def test_the_same_seed_draws_the_same_problems() -> None:
    assert draw_many(50, seed=3) == draw_many(50, seed=3)
    assert draw_many(50, seed=3) != draw_many(50, seed=4)


def test_about_a_tenth_is_held_out() -> None:
    questions = {problem.question for problem in draw_many(20_000)}
    share = sum(map(is_held_out, questions)) / len(questions)
    assert 0.085 < share < 0.115


def test_the_split_never_changes() -> None:
    questions = [problem.question for problem in draw_many(40)]
    assert [index for index, question in enumerate(questions) if is_held_out(question)] == [3, 21]


def test_the_two_sides_of_the_split_share_no_question() -> None:
    rng = random.Random(0)
    held_out = {draw_split(rng, held_out=True).question for _ in range(500)}
    training = {draw_split(rng, held_out=False).question for _ in range(5000)}
    assert not held_out & training
    assert all(map(is_held_out, held_out))


def test_builtin_tiny_names_a_folder_and_other_names_pass_through() -> None:
    assert resolve_model("builtin:tiny").endswith("tiny")
    assert resolve_model("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_an_unknown_embedded_model_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="builtin:tiny"):
        resolve_model("builtin:huge")
