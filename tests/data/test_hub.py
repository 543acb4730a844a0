import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from retrain.data.math import SUBJECTS

from .hub_server import LoopbackHub, dataset_files

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests" / "rows"

# HF_ENDPOINT is read when the libraries are imported, so loading happens in a process of its own.
SCRIPT = """
import json, sys
from retrain.config.schema import Data
from retrain.data import load_examples
from retrain.errors import RetrainError
for options in json.loads(sys.argv[1]):
    try:
        found = load_examples(Data(**options))
        print(json.dumps([[e.prompt, e.reference, e.id, dict(e.meta)] for e in found]))
    except RetrainError as error:
        print(json.dumps({type(error).__name__: str(error)}))
"""


@pytest.fixture
def load(tmp_path):
    def load_all(url: str, *requests: dict[str, str], **variables: str):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf")}
        environment |= {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
        command = [sys.executable, "-c", SCRIPT, json.dumps(requests)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return load_all


def math_row(number: int, solution: str) -> dict[str, object]:
    return {"problem": f"Problem {number}?", "level": "Level 2", "type": "Geometry", "solution": solution}


def small_hub() -> LoopbackHub:
    subjects = {
        subject: {
            "train": [math_row(n, rf"Clearly \boxed{{\frac{{{n}}}{{7}}}}.") for n in range(2)],
            "test": [math_row(9, r"There are $\boxed{}$ primes.")],
        }
        for subject in SUBJECTS
    }
    words = [{"question": "How many?", "answer": "2*617=<<2*617=1234>>1234\n#### 1,234"}]
    own = [{"ask": "2+2?", "gold": 4, "topic": "sums"}, {"ask": "3+3?", "gold": 6, "topic": "sums"}]
    return LoopbackHub(
        {
            "EleutherAI/hendrycks_math": dataset_files(subjects),
            "openai/gsm8k": dataset_files({"main": {"train": words, "test": words}}),
            "someone/sums": dataset_files({"default": {"dev": own}}),
        }
    )


@pytest.mark.slow
def test_every_hub_source_loads_through_the_real_library(load):
    with small_hub() as hub:
        train, test, one, words, own = load(
            hub.url,
            {"source": "math"},
            {"source": "math", "split": "test"},
            {"source": "math", "subset": "geometry"},
            {"source": "gsm8k"},
            {"source": "hub", "id": "someone/sums", "split": "dev", "prompt_field": "ask", "answer_field": "gold"},
        )
    assert len(train) == 2 * len(SUBJECTS) and len(test) == len(SUBJECTS)
    assert train[0] == [
        "Problem 0?\n\nPut your final answer within \\boxed{}.",
        r"\frac{0}{7}",
        "intermediate_algebra/train/0",
        {"subject": "intermediate_algebra", "level": "Level 2"},
    ]
    # Subjects take turns, so that the first few examples are not all of one.
    assert [row[3]["subject"] for row in train] == [*SUBJECTS, *SUBJECTS]
    assert {row[1] for row in test} == {"0"}
    assert {row[3]["subject"] for row in one} == {"geometry"}
    assert words[0][:2] == ["How many?\n\nPut your final answer within \\boxed{}.", "1234"]
    assert own[1] == ["3+3?", "6", "row 1", {"topic": "sums"}]


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_a_configuration_error_that_says_how_to_do_without(load):
    with small_hub() as hub:
        answers = load(
            hub.url,
            {"source": "hub", "id": "someone/absent"},
            {"source": "hub", "id": "someone/sums", "split": "nowhere"},
            {"source": "gsm8k", "subset": "nothing"},
            {"source": "hub", "id": "someone/sums", "split": "dev"},
            {"source": "hub"},
            {"source": "math", "subset": "knitting"},
        )
    absent, split, subset, fields, no_id, subject = (answer["ConfigError"] for answer in answers)
    for message in (absent, split, subset):
        assert 'source = "jsonl"' in message
    assert "the dataset someone/absent, split 'train', could not be loaded" in absent
    assert "nowhere" in split and "nothing" in subset
    assert "someone/sums has 2 invalid rows" in fields and "row 0 has none of the fields prompt" in fields
    assert 'id = "openai/gsm8k"' in no_id
    assert "counting_and_probability" in subject


def test_offline_without_a_cache_is_a_configuration_error(load):
    (answer,) = load("http://127.0.0.1:9", {"source": "gsm8k"}, HF_HUB_OFFLINE="1")
    assert "openai/gsm8k (main)" in answer["ConfigError"] and 'source = "jsonl"' in answer["ConfigError"]


@pytest.mark.slow
def test_rows_as_the_data_sets_have_them_give_a_problem_each_with_an_answer(load):
    subjects = defaultdict(list)
    for line in (ROWS / "math.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        subjects[row["subject"]].append({key: row[key] for key in ("problem", "level", "type", "solution")})
    words = [json.loads(line) for line in (ROWS / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()]
    repositories = {
        "EleutherAI/hendrycks_math": dataset_files({name: {"train": rows} for name, rows in subjects.items()}),
        "openai/gsm8k": dataset_files({"main": {"train": words}}),
    }
    with LoopbackHub(repositories) as hub:
        math, gsm8k = load(hub.url, {"source": "math"}, {"source": "gsm8k"})
    assert (len(math), len(gsm8k)) == (sum(len(subjects[subject]) for subject in SUBJECTS), len(words))
    assert all(reference for _, reference, _, _ in math)
    assert all(reference.lstrip("-").replace(".", "").isdigit() for _, reference, _, _ in gsm8k)
