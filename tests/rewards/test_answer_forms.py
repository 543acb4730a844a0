"""The `math` reward against answers that were labelled by hand, and against answers that were altered by machine."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from retrain.rewards.match import MatchReward
from retrain.rewards.math import MathReward, equal_mathematics

FORMS = [
    json.loads(line) for line in (Path(__file__).parent / "answer_forms.jsonl").read_text(encoding="utf-8").splitlines()
]
LEAST_AGREEMENT = 0.97
# Answers and references that are judged otherwise than their label says. None of them is accepted wrongly.
DISAGREEMENTS = {
    (r"|x|>1", r"(-\infty,-1)\cup(1,\infty)"),  # an inequality that is not linear
    ("[2, 2]", r"\{2\}"),
    (r"\text{twenty-one}", "21"),  # number words beyond twelve
    (r"\frac{2^{4950}\sqrt{14}}{\sqrt{14}}", "2^{4950}"),  # a large number times an irrational one
    ("_{10}C_3", "120"),
}


def load_benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "rewards.py"
    spec = importlib.util.spec_from_file_location("rewards_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_labelled_forms_are_many_and_of_both_kinds():
    assert len(FORMS) >= 300
    assert len({(form["answer"], form["reference"]) for form in FORMS}) == len(FORMS)
    kinds = Counter((form["kind"], form["equal"]) for form in FORMS)
    assert all(kinds[kind, label] >= 4 for kind, _ in kinds for label in (True, False))


def test_the_reward_agrees_with_the_labels_but_for_those_listed():
    reward = MathReward()
    scores = [reward.score(f"\\boxed{{{form['answer']}}}", form["reference"]) for form in FORMS]
    labels = [float(form["equal"]) for form in FORMS]
    found = {
        (form["answer"], form["reference"])
        for form, score, label in zip(FORMS, scores, labels, strict=True)
        if score != label
    }
    assert found == DISAGREEMENTS
    assert all(form["equal"] for form in FORMS if (form["answer"], form["reference"]) in found)
    assert 1 - len(found) / len(FORMS) >= LEAST_AGREEMENT


def test_text_alone_accepts_nothing_that_is_labelled_wrong():
    reward = MatchReward()
    wrong = [form for form in FORMS if not form["equal"]]
    accepted = [form for form in wrong if reward.score(f"\\boxed{{{form['answer']}}}", form["reference"])]
    assert accepted == []


AGREED = [form for form in FORMS if form["equal"] and (form["answer"], form["reference"]) not in DISAGREEMENTS]


@pytest.mark.parametrize("form", AGREED[::10], ids=lambda form: form["answer"])
def test_a_labelled_answer_is_right_in_a_box_and_against_itself(form):
    assert MathReward().score(f"So $\\boxed{{{form['answer']}}}$.", form["reference"]) == 1.0
    assert equal_mathematics(form["reference"], form["reference"])


def test_altered_answers_are_accepted_only_where_they_are_equal():
    benchmark = load_benchmark()
    rows = benchmark.read_rows(benchmark.EXTRACTS / "math.jsonl")
    golds = [row["answer"].strip() for row in rows if row["answer"].strip()]
    pairs = benchmark.altered_pairs(golds)
    accepted = [pair for pair in pairs if equal_mathematics(*pair)]
    assert len(pairs) > 1000
    # Order in a list, the sign of zero and a missing `x =`, which sympy compares as structures.
    equal_anyway = ("pmatrix} 0 &", r"6, 10\text", "-(0,0)", "1")
    unconfirmed = [pair for pair in accepted if not benchmark.sympy_agrees(*pair)]
    assert [pair for pair in unconfirmed if not any(part in pair[0] for part in equal_anyway)] == []


def test_references_are_right_against_themselves_and_other_forms_of_them_are_right():
    benchmark = load_benchmark()
    rows, words = (benchmark.read_rows(benchmark.EXTRACTS / name) for name in ("math.jsonl", "gsm8k.jsonl"))
    assert benchmark.check_golds(rows, words) == []


@pytest.mark.slow
def test_the_benchmark_keeps_its_bounds_on_the_extract(capsys):
    assert load_benchmark().run(["--seconds", "5"]) == 0, capsys.readouterr().out
